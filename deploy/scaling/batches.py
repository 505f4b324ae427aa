"""Batches like those of a run, simulated with other set-ups; the best splits of devices for them."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from statistics import fmean

from async_rl.errors import ConfigError
from deploy.scaling.costs import Measured
from deploy.scaling.memory import DeviceMemory
from deploy.scaling.simulation import SCHEDULES, Costs, Loss, Outcome, Schedule, SetUp, Shape, simulate

NUM_BATCHES = 4
"""Simulated of each set-up that is shown; of the many that are tried one."""

NUM_SPLITS = 40
"""Tried at most before those beside the best one."""

NUM_SHOWN = 5

TURNS = "turns"
"""Pools that take turns on all devices."""

MOST_RESPONSES = 200_000
"""Of a batch: to simulate one takes a second."""


def devices_of(run: Measured, set_up: SetUp) -> int:
    of_instance, of_replica = run.devices_of
    return set_up.num_instances * of_instance + set_up.num_replicas * of_replica


def mean_of(outcomes: Sequence[Outcome]) -> Outcome:
    return Outcome(*(fmean(getattr(each, field.name) for each in outcomes) for field in fields(Outcome)))


class Batches:
    """A run and batches like its own, or of other sizes; draws the same ones each time.

    With a `memory` only splits that have room count.
    """

    def __init__(
        self, run: Measured, num_prompts: int | None, num_responses: int | None, memory: DeviceMemory | None = None
    ) -> None:
        self._run, self._memory = run, memory
        shapes = [shape for iteration in run.iterations for shape in iteration.shapes]
        rng = random.Random(0)

        def with_responses(shape: Shape) -> Shape:
            if num_responses is None:
                return shape
            # Each as often as the others, or once more: the longest is known, and others have their mean.
            times, more = divmod(num_responses, len(shape.response_tokens))
            drawn = rng.sample(shape.response_tokens, more)
            return replace(shape, response_tokens=(*(times * shape.response_tokens), *drawn))

        self._means: dict[tuple[SetUp, int, Costs], Outcome] = {}
        number = num_prompts or round(fmean(len(iteration.groups) for iteration in run.iterations))
        size = num_responses or max(len(shape.response_tokens) for shape in shapes)
        if number * size > MOST_RESPONSES:
            raise ConfigError(
                f"a batch of {number} prompts has {number * size:,} responses: expected at most {MOST_RESPONSES:,}; "
                "ask for fewer --prompts or --responses"
            )
        self._drawn = [[with_responses(rng.choice(shapes)) for _ in range(number)] for _ in range(NUM_BATCHES)]

    def mean(self, set_up: SetUp, num_batches: int = NUM_BATCHES, costs: Costs | None = None) -> Outcome:
        """Of the first batches, each figure's mean."""
        key = (set_up, num_batches, costs or self._run.costs)
        if key not in self._means:
            self._means[key] = mean_of([simulate(batch, key[2], set_up) for batch in self._drawn[:num_batches]])
        return self._means[key]

    def between(self, set_up: SetUp) -> tuple[float, float]:
        """The least and the most seconds of an iteration, by all costs that the records allow."""
        seconds = [self.mean(set_up, costs=costs).seconds for costs in (self._run.costs, *self._run.others)]
        return min(seconds), max(seconds)

    def with_loss(self, set_up: SetUp, part: float, back_s: float) -> Outcome:
        """The mean of the same batches if an instance is lost when so much of the rollouts' time has passed."""
        lost = Loss(part * self.mean(set_up).rollout_s, back_s)
        return mean_of([simulate(batch, self._run.costs, set_up, lost) for batch in self._drawn])

    def turns(self, num_devices: int) -> SetUp:
        """Pools that take turns on all of so many devices, as many as a replica and an instance need or more."""
        of_instance, of_replica = self._run.devices_of
        num_groups = len(self._drawn[0])
        return replace(
            self._run.set_up,
            num_instances=min(num_groups, max(1, num_devices // of_instance)),
            num_replicas=min(num_groups, max(1, num_devices // of_replica)),
            schedule="synchronous",
        )

    def by_devices(self, num_devices: int) -> dict[str, list[tuple[int, float]]]:
        """Of each schedule, and of pools that take turns: (number of devices, tokens per second and device) of the best
        split, for numbers that double up to so many, as far as they have room."""
        sizes = [num_devices]
        while sizes[0] // 2 >= sum(self._run.devices_of):
            sizes.insert(0, sizes[0] // 2)
        best: dict[str, list[tuple[int, SetUp]]] = {
            schedule: [(size, found[0]) for size in sizes if (found := self._splits(size, schedule))]
            for schedule in SCHEDULES
        }
        best[TURNS] = [(size, self.turns(size)) for size in sizes if self.turns_fit(size)]
        return {
            name: [(size, self.mean(set_up).tokens_per_s / size) for size, set_up in set_ups]
            for name, set_ups in best.items()
        }

    def turns_fit(self, num_devices: int) -> bool:
        return self._memory is None or self._memory.fits(self.turns(num_devices).num_replicas, "turns")

    def splits(self, num_devices: int) -> list[SetUp]:
        """Of so many devices, those whose iterations are shortest, the best one first, in the run's schedule.

        Raises:
            ConfigError: there are too few for an instance and a replica, or none has room for it.
        """
        of_instance, of_replica = self._run.devices_of
        if num_devices < of_instance + of_replica:
            raise ConfigError(
                f"--devices is {num_devices}: an instance of this run has {of_instance}, a replica {of_replica}; name "
                f"at least {of_instance + of_replica}"
            )
        if self._memory is not None:
            self._memory.require_room()
        found = self._splits(num_devices, self._run.set_up.schedule)
        if not found and self._memory is not None:
            raise self._memory.no_split(num_devices)
        return found

    def _splits(self, num_devices: int, schedule: Schedule) -> list[SetUp]:
        of_instance, of_replica = self._run.devices_of
        num_groups, now = len(self._drawn[0]), self._run.set_up
        most = min((num_devices - of_instance) // of_replica, num_groups)

        def split(num_replicas: int) -> SetUp:
            num_instances = min(num_groups, (num_devices - num_replicas * of_replica) // of_instance)
            return replace(now, num_instances=num_instances, num_replicas=num_replicas, schedule=schedule)

        seconds: dict[int, float] = {}

        def measure(numbers: Iterable[int]) -> None:
            for number in set(numbers) - seconds.keys():
                if self._memory is None or self._memory.fits(number):
                    seconds[number] = self.mean(split(number), 1).seconds

        measure(1 + place * (most - 1) // NUM_SPLITS for place in range(NUM_SPLITS + 1))
        for _ in range(2 if seconds else 0):
            around, gap = min(seconds, key=seconds.__getitem__), max(1, most // NUM_SPLITS)
            measure(range(max(1, around - gap), min(most, around + gap) + 1))
        shown = [split(number) for number in sorted(seconds, key=seconds.__getitem__)[:NUM_SHOWN]]
        return sorted(shown, key=lambda each: (float(f"{self.mean(each).seconds:.3g}"), devices_of(self._run, each)))
