"""The producer's interface of a reward, and the result that every reward must return: one finite float per response."""

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence, Set
from itertools import islice
from typing import Any, Protocol, TypeVar

from async_rl.method.types import CorrectAt, Prompt, Response, RewardParts, Scores

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

MAX_REWARD = 1e30
"""The sum of its squares over a group is far below float64's maximum (2e308), and it is far below float32's (3e38)."""

USED_SHARE = 0.9
"""The part of `reward.timeout_s` that a reward's own limits may take: its call has to end within it."""

CORRECT_AT = "correct_at"
"""The attribute of a reward function with the smallest reward of a correct response."""

PER_RESPONSE = "per_response"
"""The attribute of a reward function that makes a request for each response."""


SCORE = "score"
"""The reward in a mapping that a reward function returns for a response; its other numbers are metrics."""


class NotRewards(ValueError):
    """A reward function asks for what there is not, or returned something else than one finite float per response."""


class Reward(Protocol):
    """Scores groups. All methods run on the producer's event loop."""

    @property
    def correct_at(self) -> CorrectAt:
        """Which responses are correct; None if the reward does not define it. Known after `start`.

        Without it there is no accuracy and no pass@k: a reward that counts characters has no correct responses.
        """
        ...

    async def start(self) -> None:
        """Prepares scoring, so that the first batch is not slow; a second call does nothing.

        Raises:
            ConfigError: a requirement of the reward is not installed, or it cannot be loaded.
        """
        ...

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> Scores:
        """One finite float per response, in their order; of a composed reward also those of its parts.

        Raises:
            RewardError: the reward raised, hung or returned something else, as often as `reward.max_attempts` allows;
                names the reward, the prompt and the attempt.
        """
        ...

    async def close(self) -> None:
        """Ends what `start` started, within a few seconds whatever the reward does."""
        ...


def correct_at(threshold: float) -> Callable[[F], F]:
    """Declares that responses with a reward of `threshold` or more are correct: `@correct_at(1.0)`.

    Setting `function.correct_at = 1.0` is the same.
    """

    def declare(function: F) -> F:
        setattr(function, CORRECT_AT, threshold)
        return function

    return declare


async def gathered(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all calls; the first failure cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as siblings:
            tasks = [siblings.create_task(call) for call in calls]
    except BaseExceptionGroup as errors:
        (first, *_) = errors.exceptions
        # Not of the group, whose traceback has all of them; and with what it came from.
        raise first from first.__cause__
    return [task.result() for task in tasks]


def as_rewards(returned: object, num_responses: int) -> list[float]:
    """A reward function's return value, as floats, without its metrics.

    Raises:
        NotRewards: it is not one finite float per response.
    """
    return list(as_scores(returned, num_responses).rewards)


def as_scores(returned: object, num_responses: int) -> Scores:
    """A reward function's return value: rewards and, where it has a mapping for each response, metrics.

    Raises:
        NotRewards: it is not one finite float, or one mapping with such a `score`, per response; or a metric has a
            name that is none.
    """
    expected = f"expected {num_responses} finite floats of at most {MAX_REWARD:g}, one per response"
    # What a mapping iterates over are its keys, and a set has no order.
    if isinstance(returned, (str, bytes, Mapping, Set)) or not hasattr(returned, "__iter__"):
        raise NotRewards(f"it returned {returned!r:.200}, {expected}")
    # One more than expected is enough to detect too many: an iterator may never end.
    values = list(islice(iter(returned), num_responses + 1))
    if len(values) != num_responses:
        many = "more" if len(values) > num_responses else f"{len(values)} values"
        raise NotRewards(f"it returned {many}, {expected}")
    floats = [as_float(value.get(SCORE) if isinstance(value, Mapping) else value) for value in values]
    for value, number in zip(values, floats, strict=True):
        if not is_reward(number):
            more = f" or a mapping with such a {SCORE!r}" if isinstance(value, Mapping) else ""
            raise NotRewards(f"it returned {value!r:.200} among its values, {expected}{more}")
    return Scores(tuple(floats), metrics=_metrics(values))


def _metrics(values: Sequence[Any]) -> RewardParts:
    """The numbers beside the score that the mappings of all responses have; anything else in them is not shown."""
    if not values or not all(isinstance(value, Mapping) for value in values):
        return ()
    numbers = {
        name: tuple(as_float(value.get(name)) for value in values)
        for name in values[0]
        if isinstance(name, str) and name != SCORE
    }
    found = tuple((name, each) for name, each in numbers.items() if all(map(is_reward, each)))
    for name, _ in found:
        if not (name and name.isprintable()):
            raise NotRewards(f"it returned a metric named {name!r:.200}, expected printable characters")
    return found


def as_float(value: Any) -> float:
    """NaN for what is no number, as an array of several, and for an integer that no float can hold."""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return math.nan
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError):
        return math.nan


def is_reward(value: float) -> bool:
    """Whether it is finite and not absurdly large; a larger value is an error of the reward."""
    # NaN compares with nothing; an integer of any size compares, where `isfinite` would overflow.
    return abs(value) <= MAX_REWARD
