"""What a client gets of a turn, before it is written in the form of one of OpenAI's APIs; for `line`."""

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from async_rl.rollouts.agents.session import Turn

AT_LIMIT = "The limit of this conversation is reached."

Decode = Callable[[Sequence[int]], Sequence[str]]
"""The text of each of some tokens."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`token_ids` and `logprobs` are of the sampled tokens; `id` and `created` stay when it is sent again."""

    message: Mapping[str, Any]
    finish_reason: str
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, turn: Turn) -> "Answer":
        return cls(turn.message, turn.finish_reason, turn.prompt_token_ids, turn.token_ids, turn.logprobs)

    @classmethod
    def without_room(cls) -> "Answer":
        """What a rollout at its limit still gets; it is not the policy's, and not trained.

        With a text, since some frameworks take an answer without any as a fault of the server.
        """
        return cls({"role": "assistant", "content": AT_LIMIT}, "length", (), (), ())

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        """The calls of the message, in the form of chat completions."""
        calls: Sequence[Mapping[str, Any]] = self.message.get("tool_calls", ())
        return calls

    def logprob_entries(self, decode: Decode) -> list[dict[str, Any]]:
        """Of each sampled token, in the form that both APIs share; without alternatives."""
        return [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(decode(self.token_ids), self.logprobs, strict=True)
        ]


def to_json(body: Mapping[str, Any]) -> bytes:
    """Without spaces."""
    return json.dumps(body, separators=(",", ":")).encode()
