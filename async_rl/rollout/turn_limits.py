"""How many tokens a turn may still have under the limits of its rollout; for `session`."""

import math
from dataclasses import dataclass

from async_rl.config.rollout_section import RolloutSection
from async_rl.rollout.turn import Limit, LimitReached


@dataclass(frozen=True, slots=True)
class Used:
    """What a rollout has used: turns, sampled tokens, and the tokens that the next turn follows."""

    turns: int
    tokens: int
    context: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one rollout; `longest` is None where neither the instances nor the config limit prompt and response."""

    max_turns: int
    max_response_tokens: int
    longest: int | None

    @classmethod
    def of(cls, rollout: RolloutSection, max_response_tokens: int, max_model_len: int | None) -> "Limits":
        lengths = (length for length in (max_model_len, rollout.max_context_tokens) if length)
        return cls(rollout.max_turns, max_response_tokens, min(lengths, default=None))

    def allowance(self, used: Used, asked: int | None) -> tuple[int, Limit | None]:
        """How many tokens a turn may have, and the limit that sets this number, if one does.

        Raises:
            LimitReached: none.
        """
        room: dict[Limit, float] = {
            "turns": math.inf if used.turns < self.max_turns else 0,
            "tokens": self.max_response_tokens - used.tokens,
            "context": math.inf if self.longest is None else self.longest - used.context,
        }
        limit = min(room, key=room.__getitem__)
        if room[limit] <= 0:
            settings = f"rollout.max_turns = {self.max_turns}, max_response_tokens = {self.max_response_tokens}"
            raise LimitReached(
                limit, f"the rollout has reached its limit of {limit} ({settings}, at most {self.longest} in all)"
            )
        if asked is not None and asked < room[limit]:
            return asked, None
        return int(room[limit]), limit
