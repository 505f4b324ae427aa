"""The producer's interface of a reward, and the result that every reward must return: one finite float per response."""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import islice
from typing import Any, Protocol, TypeVar

from async_rl.types import CorrectAt, Prompt, Response, Scores

F = TypeVar("F", bound=Callable[..., Any])

LARGEST_REWARD = 1e30
"""The sum of its squares over a group is far below float64's maximum (2e308), and it is far below float32's (3e38)."""

USED_SHARE = 0.9
"""The part of `reward.timeout_s` that a reward's own limits may take: its call has to end within it."""

CORRECT_AT = "correct_at"
"""The attribute of a reward function with the smallest reward of a correct response."""

PER_RESPONSE = "per_response"
"""The attribute of a reward function that makes a request for each response."""


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
            RewardError: the reward raised, hung or returned something else, as often as `reward.on_error` allows;
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


def as_rewards(returned: object, num_responses: int) -> list[float]:
    """A reward function's return value, as floats.

    Raises:
        ValueError: it is not one finite float per response.
    """
    expected = f"expected {num_responses} finite floats of at most {LARGEST_REWARD:g}, one per response"
    # What a mapping iterates over are its keys, and a set has no order.
    if isinstance(returned, (str, bytes, Mapping, Set)) or not hasattr(returned, "__iter__"):
        raise ValueError(f"it returned {returned!r:.200}, {expected}")
    # One more than expected is enough to detect too many: an iterator may never end.
    values = list(islice(iter(returned), num_responses + 1))
    if len(values) != num_responses:
        many = "more" if len(values) > num_responses else f"{len(values)} values"
        raise ValueError(f"it returned {many}, {expected}")
    floats = [as_float(value) for value in values]
    for value, number in zip(values, floats, strict=True):
        if not is_reward(number):
            raise ValueError(f"it returned {value!r:.200} among its values, {expected}")
    return floats


def as_float(value: Any) -> float:
    """NaN for what is no number, and for an integer that no float can hold."""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def is_reward(value: float) -> bool:
    """Whether it is finite and not absurdly large; a larger value is an error of the reward."""
    # NaN compares with nothing; an integer of any size compares, where `isfinite` would overflow.
    return abs(value) <= LARGEST_REWARD
