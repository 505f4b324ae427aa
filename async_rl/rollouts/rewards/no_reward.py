"""No reward: of a run whose rollout program rewards itself."""

from collections.abc import Sequence

from async_rl.errors import RewardError
from async_rl.method.types import Prompt, Response, Scores


class NoReward:
    """Implements `Reward`; it scores nothing."""

    @property
    def correct_at(self) -> float | None:
        return None

    async def start(self) -> None:
        return None

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> Scores:
        raise RewardError("nothing scores these responses: set reward.name")

    async def close(self) -> None:
        return None
