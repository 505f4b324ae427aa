"""What the producer asks of a reward, and what every reward owes: one finite float per response."""

import math
from collections.abc import Sequence
from typing import Protocol

from async_rl.types import Prompt, Response


class Reward(Protocol):
    """Scores groups. All methods run on the producer's event loop."""

    async def start(self) -> None:
        """Prepares scoring, so that the first batch is not slow.

        Raises:
            ConfigError: what the reward needs is not installed or cannot be loaded.
        """
        ...

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> list[float]:
        """One finite float per response, in their order.

        Raises:
            RewardError: the reward raised, hung or returned something else; names the reward and the prompt.
        """
        ...

    async def close(self) -> None:
        """Ends what `start` began."""
        ...


def as_rewards(returned: object, num_responses: int) -> list[float]:
    """What a reward function returned, as floats.

    Raises:
        ValueError: it is not one finite float per response.
    """
    expected = f"expected {num_responses} finite floats, one per response"
    if isinstance(returned, (str, bytes)) or not hasattr(returned, "__iter__"):
        raise ValueError(f"it returned {returned!r:.200}, {expected}")
    values = list(returned)
    if len(values) != num_responses:
        raise ValueError(f"it returned {len(values)} values, {expected}")
    for value in values:
        if isinstance(value, str) or not hasattr(value, "__float__") or not math.isfinite(value):
            raise ValueError(f"it returned {value!r:.200} among its values, {expected}")
    return [float(value) for value in values]
