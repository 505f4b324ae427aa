"""What the policy gives a rollout program: a turn, or the reason why there is none."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from async_rl.token_arrays import Logprobs, TokenIds
from async_rl.types import WeightVersion

Limit = Literal["turns", "tokens", "context", "time"]


class LimitReached(Exception):
    """The rollout has reached a limit: an outcome. No further turn is sampled; those it has are trained."""

    def __init__(self, limit: Limit, message: str) -> None:
        super().__init__(message)
        self.limit: Limit = limit


class SessionClosed(Exception):
    """The rollout has ended; it gets no further turns."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Turn:
    """One turn as its program sees it.

    `message` is an OpenAI chat message: role, content, and where they apply reasoning_content and tool_calls.
    `token_ids` and `logprobs` are those that were sampled after `prompt_token_ids`; `finish_reason` is "stop" or
    "length".
    """

    message: Mapping[str, Any]
    token_ids: TokenIds
    logprobs: Logprobs
    finish_reason: str
    prompt_token_ids: TokenIds
    weight_version: WeightVersion

    @property
    def text(self) -> str:
        """The content of its message."""
        content: str = self.message["content"]
        return content

    @property
    def tool_calls(self) -> list[Mapping[str, Any]]:
        """The calls of its message, which may be none."""
        return list(self.message.get("tool_calls", ()))
