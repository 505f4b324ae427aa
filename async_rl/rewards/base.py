"""What the producer asks of a reward, and what every reward owes: one finite float per response."""

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Protocol, TypeVar

from async_rl.types import Prompt, Response

F = TypeVar("F", bound=Callable[..., Any])

LARGEST_REWARD = 1e30
"""Its squares, summed over a group, are far from the end of float64 (2e308); it is far from that of float32 (3e38)."""

CORRECT_AT = "correct_at"
"""The attribute of a reward function that says from which reward on a response counts as correct."""


class Reward(Protocol):
    """Scores groups. All methods run on the producer's event loop."""

    @property
    def correct_at(self) -> float | None:
        """From which reward on a response counts as correct; None where the reward does not say. Known after `start`.

        Without it there is no accuracy and no pass@k: a reward that counts characters has no correct responses.
        """
        ...

    async def start(self) -> None:
        """Prepares scoring, so that the first batch is not slow; a second call does nothing.

        Raises:
            ConfigError: what the reward needs is not installed or cannot be loaded.
        """
        ...

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> list[float]:
        """One finite float per response, in their order.

        Raises:
            RewardError: the reward raised, hung or returned something else, as often as `reward.on_error` allows;
                names the reward, the prompt and the attempt.
        """
        ...

    async def close(self) -> None:
        """Ends what `start` began, within a few seconds whatever the reward does."""
        ...


def correct_at(threshold: float) -> Callable[[F], F]:
    """Declares that responses with a reward of `threshold` or more are correct: `@correct_at(1.0)`.

    To set `function.correct_at = 1.0` is the same.
    """

    def declare(function: F) -> F:
        setattr(function, CORRECT_AT, threshold)
        return function

    return declare


def as_rewards(returned: object, num_responses: int) -> list[float]:
    """What a reward function returned, as floats.

    Raises:
        ValueError: it is not one finite float per response.
    """
    expected = f"expected {num_responses} finite floats of at most {LARGEST_REWARD:g}, one per response"
    if isinstance(returned, (str, bytes)) or not hasattr(returned, "__iter__"):
        raise ValueError(f"it returned {returned!r:.200}, {expected}")
    # One more than expected is enough to know of: an iterator may never end.
    values = list(islice(iter(returned), num_responses + 1))
    if len(values) != num_responses:
        many = "more" if len(values) > num_responses else f"{len(values)} values"
        raise ValueError(f"it returned {many}, {expected}")
    floats = [_as_float(value) for value in values]
    for value, number in zip(values, floats, strict=True):
        if not is_reward(number):
            raise ValueError(f"it returned {value!r:.200} among its values, {expected}")
    return floats


def _as_float(value: Any) -> float:
    """NaN for what is no number, and for an integer that no float can hold."""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def is_reward(value: float) -> bool:
    """Whether it is finite and not absurdly large; a reward of more than that is a mistake of the reward's."""
    # NaN compares with nothing; an integer of any size compares, where `isfinite` would overflow.
    return abs(value) <= LARGEST_REWARD
