"""One iteration, simulated: when its groups finish at the instances, and when replicas have trained them.

A discrete-event simulation of the period (`docs/period.md`) with the costs of `Costs`. What it leaves out: `ASSUMED`.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Schedule = Literal["periodic", "synchronous", "one step behind"]
SCHEDULES: tuple[Schedule, ...] = ("periodic", "synchronous", "one step behind")

ASSUMED = (
    "an instance and a replica are as fast as those that were measured, however many there are",
    "an optimizer step takes as long with more replicas; weights pass from instance to instance in pieces",
    "a token costs the same wherever it is in a response",
    "responses are as long as those of the run",
    "pools that share processors slow each other down by the same factor in every set-up",
)
"""What is taken for granted, in words."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A group's sizes, in tokens: those of its prompt, and of each of its responses; a selection may leave it out.

    `expected` is how long its responses were expected to be, as a multiple of the mean of all groups.
    """

    prompt_tokens: int
    response_tokens: tuple[int, ...]
    is_trained: bool = True
    expected: float = 1.0

    @property
    def num_rows(self) -> int:
        """The rows of a micro-batch that it takes: its prompt once."""
        return self.prompt_tokens + sum(self.response_tokens)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of each part, of one instance and of one replica.

    A decoding step of n running responses takes `step_s + n * token_s`, a prompt `prompt_token_s` for each of its
    tokens, during which nothing else is decoded; a finished group is in the queue `score_s` later. A window takes
    `window_s + rows * row_s`. `optimizer_s`, `publish_s` and `between_s`, the rest, are those of an iteration, the
    publish to one instance: each further one adds `passing_s` (`publish.py`).
    """

    step_s: float
    token_s: float
    prompt_token_s: float
    score_s: float
    window_s: float
    row_s: float
    optimizer_s: float
    publish_s: float
    between_s: float = 0.0
    slower_decoding: float = 1.0
    """Times that a step, or a prompt, takes as long while all replicas train: above 1 where pools share processors."""
    slower_training: float = 1.0
    """Times that a window takes as long while rollouts run."""
    passing_s: float = 0.0

    def publish_to_s(self, num_instances: int) -> float:
        return self.publish_s + (num_instances - 1) * self.passing_s


@dataclass(frozen=True, slots=True)
class SetUp:
    """How many of each, and how the two pools work together.

    Attributes:
        max_running: responses that an instance decodes at once; others wait there.
        window_rows: most rows of a window, unless a single group has more.
        has_dock: replicas take what has finished, or if they train after the rollouts, parts of equally many rows;
            without, each gets the groups at its own indices.
        has_tail: instances take what waits, the longest expected first; without, each gets the groups at its own
            indices before any rollout begins.
    """

    num_instances: int = 1
    num_replicas: int = 1
    max_running: int = 256
    window_rows: int = 4096
    schedule: Schedule = "periodic"
    has_dock: bool = True
    has_tail: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """One iteration, in seconds: `rollout_s` from the dispatch to the last group, `train_s` of the busiest replica."""

    seconds: float
    rollout_s: float
    train_s: float
    wait_s: float
    num_response_tokens: float
    """Of trained groups; a mean of several iterations may be no whole number."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_response_tokens / self.seconds

    @property
    def idle_training(self) -> float:
        """Share of the iteration in which the busiest replica waits for rollouts."""
        return self.wait_s / self.seconds

    @property
    def idle_inference(self) -> float:
        """Share of the iteration in which no rollouts run."""
        return 1 - min(1.0, self.rollout_s / self.seconds)


@dataclass(frozen=True, slots=True)
class Loss:
    """An instance is lost `at_s` after the dispatch, and is back `back_s` later, for which only a pool of one waits."""

    at_s: float
    back_s: float


def simulate(groups: Sequence[Shape], costs: Costs, set_up: SetUp, loss: Loss | None = None) -> Outcome:
    """An iteration of these groups, at least one, all dispatched at its beginning."""
    alone = finish_times(groups, costs, set_up, loss)
    rollouts = max(alone)
    arrivals = [
        (end if set_up.schedule == "periodic" else 0.0, group.num_rows)
        for end, group in zip(alone, groups, strict=True)
        if group.is_trained
    ]
    after_s = rollouts if set_up.schedule == "synchronous" else 0.0
    trained_s, train_s, rollout_s = train(arrivals, costs, set_up, rollouts - after_s)
    last = after_s + trained_s + costs.optimizer_s
    if set_up.schedule == "one step behind":
        last = max(last, rollout_s)
    return Outcome(
        seconds=costs.publish_to_s(set_up.num_instances) + last + costs.between_s,
        rollout_s=after_s + rollout_s,
        train_s=train_s,
        wait_s=max(0.0, last - costs.optimizer_s - train_s),
        num_response_tokens=sum(sum(group.response_tokens) for group in groups if group.is_trained),
    )


class _Instance:
    """Decodes its responses in turn: each step gives every running one a token.

    `_num_steps` counts them, so that a response that begins now ends at a known number of steps.
    """

    def __init__(self, costs: Costs, max_running: int) -> None:
        self._costs = costs
        self._max_running = max_running
        self._waiting: deque[tuple[int, int, int, int]] = deque()
        """(group, tokens that are left, tokens that are computed first, tokens of its prompt and response)."""
        self._running: list[tuple[float, int, int]] = []
        """A heap of (number of steps at its end, group, tokens of its prompt and response)."""
        self._now_s, self._num_steps = 0.0, 0.0

    @property
    def has_room(self) -> bool:
        return len(self._running) < self._max_running

    def left_at(self, at_s: float) -> float:
        """Tokens of its responses that are not sampled by then."""
        self._pass(at_s)
        return sum(end - self._num_steps for end, _, _ in self._running) + sum(each[1] for each in self._waiting)

    def give(self, index: int, group: Shape) -> None:
        for number, tokens in enumerate(group.response_tokens):
            first = 0 if number else group.prompt_tokens
            self._waiting.append((index, tokens, first, group.prompt_tokens + tokens))
        self._admit()

    def continue_response(self, at_s: float, index: int, left: int, num_tokens: int) -> None:
        """Goes on with one that another instance has lost: what was sampled of it is computed again."""
        self._pass(at_s)
        self._waiting.append((index, left, num_tokens - left, num_tokens))
        self._admit()

    def lose(self, at_s: float) -> list[tuple[int, int, int]]:
        """Forgets all that has not ended, as (group, tokens that are left, tokens of its prompt and response)."""
        self._pass(at_s)
        running = [(index, math.ceil(end - self._num_steps - 1e-9), of) for end, index, of in sorted(self._running)]
        lost = running + [(index, left, of) for index, left, _, of in self._waiting]
        self._running.clear()
        self._waiting.clear()
        return lost

    def _pass(self, until_s: float) -> None:
        # A prompt that is being computed is computed to its end.
        if self._running and until_s > self._now_s and self._step_s:
            self._num_steps += (until_s - self._now_s) / self._step_s
        self._now_s = max(self._now_s, until_s)

    @property
    def _step_s(self) -> float:
        return self._costs.step_s + len(self._running) * self._costs.token_s

    def _admit(self) -> None:
        while self._waiting and self.has_room:
            index, left, first, num_tokens = self._waiting.popleft()
            self._now_s += first * self._costs.prompt_token_s
            heapq.heappush(self._running, (self._num_steps + left, index, num_tokens))

    def next_end_s(self) -> float:
        """When the next response ends; infinite if it has none."""
        if not self._running:
            return math.inf
        return self._now_s + (self._running[0][0] - self._num_steps) * self._step_s

    def end_next(self) -> int:
        """The group of the response that ends next, at `next_end_s`."""
        self._now_s = self.next_end_s()
        self._num_steps, index, _ = heapq.heappop(self._running)
        self._admit()
        return index


def finish_times(groups: Sequence[Shape], costs: Costs, set_up: SetUp, loss: Loss | None = None) -> list[float]:
    """When each group is in the queue, in seconds after the dispatch.

    The longest expected one is first, and each goes to the instance with the fewest expected tokens. An instance gets
    no further group while it has as many responses as it decodes at once; but without `has_tail` each has its groups
    from the beginning. Responses of one that is lost go on from what was sampled of them, each at the instance with the
    fewest tokens left.
    """
    instances = [_Instance(costs, set_up.max_running) for _ in range(min(set_up.num_instances, len(groups)))]
    order = deque(sorted(enumerate(groups), key=lambda each: -each[1].expected) if set_up.has_tail else ())
    if not set_up.has_tail:
        for index, group in enumerate(groups):
            instances[index % len(instances)].give(index, group)
    mean = sum(sum(group.response_tokens) for group in groups) / sum(len(group.response_tokens) for group in groups)
    least = [(0.0, place) for place in range(len(instances))]
    while order and least:
        tokens, place = heapq.heappop(least)
        index, group = order.popleft()
        instances[place].give(index, group)
        if instances[place].has_room:
            tokens += group.prompt_tokens + len(group.response_tokens) * group.expected * mean
            heapq.heappush(least, (tokens, place))
    left = [len(group.response_tokens) for group in groups]
    finished = [0.0] * len(groups)
    ends = _ends_of(instances)
    num_left = sum(left)
    while num_left:
        if loss is not None and ends[0][0] > loss.at_s:
            _lose_first(instances, loss)
            ends, loss = _ends_of(instances), None
        ended_s, place = heapq.heappop(ends)
        index = instances[place].end_next()
        num_left -= 1
        left[index] -= 1
        if not left[index]:
            finished[index] = ended_s + costs.score_s
        # As long as a group is left, all others are full.
        if order and instances[place].has_room:
            instances[place].give(*order.popleft())
        heapq.heappush(ends, (instances[place].next_end_s(), place))
    return finished


def _ends_of(instances: Sequence[_Instance]) -> list[tuple[float, int]]:
    """A heap of (when the next response of an instance ends, its place)."""
    ends = [(instance.next_end_s(), place) for place, instance in enumerate(instances)]
    heapq.heapify(ends)
    return ends


def _lose_first(instances: list[_Instance], loss: Loss) -> None:
    """The first one is lost: others go on with its responses, or if there are none it, when it is back."""
    lost = instances[0].lose(loss.at_s)
    others = list(enumerate(instances))[1:] or [(0, instances[0])]
    at_s = loss.at_s if len(instances) > 1 else loss.at_s + loss.back_s
    least = [(instance.left_at(loss.at_s), place) for place, instance in others]
    heapq.heapify(least)
    for index, left, num_tokens in lost:
        tokens, place = heapq.heappop(least)
        instances[place].continue_response(at_s, index, left, num_tokens)
        heapq.heappush(least, (tokens + left, place))


@dataclass(slots=True)
class _Share:
    """Groups that the same replicas train: those of `free`, a heap, when it is made."""

    free: list[int]
    num_replicas: int
    waiting: list[int] = field(default_factory=list)
    """A heap of -rows."""
    left: int = 0
    """Rows that no window has begun with."""

    def windows(self, window_rows: int) -> Iterator[tuple[int, int]]:
        """(replica, rows) of those that begin now."""
        # Replicas that are free at the same time have the same.
        most = min(window_rows, self.left / self.num_replicas)
        while self.free and self.waiting:
            rows = -heapq.heappop(self.waiting)
            while self.waiting and rows - self.waiting[0] <= most:
                rows -= heapq.heappop(self.waiting)
            self.left -= rows
            yield heapq.heappop(self.free), rows


def _replicas_of(rows: Sequence[int], num_replicas: int, set_up: SetUp) -> list[int]:
    """Of each arrival the replica that it is for, or 0 of all that are for whoever is free."""
    if not set_up.has_dock:
        return [index % num_replicas for index in range(len(rows))]
    found = [0] * len(rows)
    if set_up.schedule == "synchronous":
        # The dock gives all at once then, in parts of equally many tokens.
        least = [(0, replica) for replica in range(num_replicas)]
        for index in sorted(range(len(rows)), key=lambda index: -rows[index]):
            given, found[index] = least[0]
            heapq.heapreplace(least, (given + rows[index], found[index]))
    return found


def train(
    arrivals: Sequence[tuple[float, int]], costs: Costs, set_up: SetUp, rollouts: float = 0.0
) -> tuple[float, float, float]:
    """(end, time in windows of the busiest replica, end of the rollouts) of groups that arrive as (time, rows).

    A replica that is free trains what waits, the largest groups first, up to a window, and at most its share of what
    is left of the batch, so that all end together; or up to a window of its own, where groups are for a replica each
    (`_replicas_of`).

    Arrivals, and `rollouts`, the end of the last one, are in the time that rollouts take alone. The pools have a clock
    each, which goes slower while the other one works.
    """
    # A group is trained by one of them.
    num_replicas = max(1, min(set_up.num_replicas, len(arrivals)))
    is_shared = set_up.has_dock and set_up.schedule != "synchronous"
    shares = [_Share([each], 1) for each in range(num_replicas)]
    if is_shared:
        shares = [_Share(list(range(num_replicas)), num_replicas)]
    busy_s = [0.0] * num_replicas
    running: list[tuple[float, int, float]] = []
    """A heap of (end by the clock of training, replica, beginning in seconds)."""
    given = _replicas_of([rows for _, rows in arrivals], num_replicas, set_up)
    coming = deque(sorted((*each, place) for each, place in zip(arrivals, given, strict=True)))
    for _, rows, place in coming:
        shares[place].left += rows
    changed: set[int] = set()
    """Shares with a group or a replica more."""
    now_s, end_s, rolled, trained, rollout_s = 0.0, 0.0, 0.0, 0.0, 0.0 if rollouts <= 0 else math.inf
    while coming or changed or running or rollout_s == math.inf:
        while coming and coming[0][0] <= rolled:
            _, rows, place = coming.popleft()
            heapq.heappush(shares[place].waiting, -rows)
            changed.add(place)
        for place in changed:
            for replica, rows in shares[place].windows(set_up.window_rows):
                heapq.heappush(running, (trained + costs.window_s + rows * costs.row_s, replica, now_s))
        changed.clear()
        if not (coming or running or rollout_s == math.inf):
            break
        rate = 1 / (1 + (costs.slower_decoding - 1) * len(running) / num_replicas)
        train_rate = 1.0 if rollout_s < math.inf else 1 / costs.slower_training
        # What comes next, by the clock of rollouts and by that of training.
        to_roll = min(coming[0][0] if coming else math.inf, rollouts if rollout_s == math.inf else math.inf)
        to_train = running[0][0] if running else math.inf
        if (to_roll - rolled) / rate <= (to_train - trained) / train_rate:
            now_s += (to_roll - rolled) / rate
            trained += (to_roll - rolled) / rate * train_rate
            rolled = to_roll
            rollout_s = now_s if rolled >= rollouts else rollout_s
        else:
            now_s += (to_train - trained) / train_rate
            rolled += (to_train - trained) / train_rate * rate
            trained, end_s = to_train, now_s
            while running and running[0][0] <= trained:
                _, replica, began_s = heapq.heappop(running)
                busy_s[replica] += now_s - began_s
                place = 0 if is_shared else replica
                heapq.heappush(shares[place].free, replica)
                changed.add(place)
    return end_s, max(busy_s), rollout_s
