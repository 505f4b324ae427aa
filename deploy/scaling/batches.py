"""Batches like those of a run, simulated with other set-ups; the best splits of devices for them."""

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from statistics import fmean

from async_rl.errors import ConfigError
from deploy.scaling.costs import Measured
from deploy.scaling.simulation import Costs, Outcome, SetUp, Shape, simulate

NUM_BATCHES = 4
"""Simulated of each set-up that is shown; of the many that are tried one."""

NUM_SPLITS = 40
"""Tried at most before those beside the best one."""

NUM_SHOWN = 5

MOST_RESPONSES = 200_000
"""Of a batch: to simulate one takes a second."""


def devices_of(run: Measured, set_up: SetUp) -> int:
    of_instance, of_replica = run.devices_of
    return set_up.num_instances * of_instance + set_up.num_replicas * of_replica


def mean_of(outcomes: Sequence[Outcome]) -> Outcome:
    return Outcome(*(fmean(getattr(each, field.name) for each in outcomes) for field in fields(Outcome)))


class Batches:
    """A run and batches like its own, or of other sizes; draws the same ones each time."""

    def __init__(self, run: Measured, num_prompts: int | None, num_responses: int | None) -> None:
        self._run = run
        shapes = [shape for iteration in run.iterations for shape in iteration.shapes]
        rng = random.Random(0)

        def with_responses(shape: Shape) -> Shape:
            if num_responses is None:
                return shape
            return replace(shape, response_tokens=tuple(rng.choices(shape.response_tokens, k=num_responses)))

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

    def splits(self, num_devices: int) -> list[SetUp]:
        """Of so many devices, those whose iterations are shortest, the best one first.

        Raises:
            ConfigError: there is no room for an instance and a replica.
        """
        of_instance, of_replica = self._run.devices_of
        most = (num_devices - of_instance) // of_replica
        if most < 1:
            raise ConfigError(
                f"--devices is {num_devices}: an instance of this run has {of_instance}, a replica {of_replica}; name "
                f"at least {of_instance + of_replica}"
            )
        num_groups = len(self._drawn[0])
        most = min(most, num_groups)

        def split(num_replicas: int) -> SetUp:
            num_instances = min(num_groups, (num_devices - num_replicas * of_replica) // of_instance)
            return replace(self._run.set_up, num_instances=num_instances, num_replicas=num_replicas)

        tried = {1 + place * (most - 1) // NUM_SPLITS for place in range(NUM_SPLITS + 1)}
        seconds = {number: self.mean(split(number), 1).seconds for number in tried}
        for _ in range(2):
            around = min(seconds, key=seconds.__getitem__)
            gap = max(1, most // NUM_SPLITS)
            for number in range(max(1, around - gap), min(most, around + gap) + 1):
                if number not in seconds:
                    seconds[number] = self.mean(split(number), 1).seconds
        shown = [split(number) for number in sorted(seconds, key=seconds.__getitem__)[:NUM_SHOWN]]
        return sorted(shown, key=lambda each: (float(f"{self.mean(each).seconds:.3g}"), devices_of(self._run, each)))
