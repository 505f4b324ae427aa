"""What the policy gives a rollout program: a turn, or the reason why there is none."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from async_rl.config.prompts_section import MAX_STOPS
from async_rl.method.token_arrays import Logprobs, TokenIds
from async_rl.method.types import WeightVersion, digest_of
from async_rl.rollouts.agents.messages import InvalidRequest, Message, ParsedCall


def plain_message(text: str, stop: Sequence[str]) -> dict[str, Any]:
    """The text up to the first of the texts `stop`."""
    return {"role": "assistant", "content": _before(text, stop)}


def parsed_message(
    message: dict[str, Any], calls: Sequence[ParsedCall], stop: Sequence[str], turn: tuple[str, int]
) -> dict[str, Any]:
    """The message that a renderer made, with its calls of tools, named after the turn where they have no name."""
    message["content"] = _before(message["content"], stop)
    if calls:
        names = (digest_of([*turn, number]) for number in itertools.count())
        message["tool_calls"] = [_tool_call(call, name) for call, name in zip(calls, names, strict=False)]
    return message


def _tool_call(call: ParsedCall, name: str) -> dict[str, Any]:
    return {
        "id": call.id or f"call_{name}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _before(text: str, stop: Sequence[str]) -> str:
    return text[: min((text.index(end) for end in stop if end in text), default=len(text))]


MAX_TOKEN_ID = 2**31


def require_well_formed(
    messages: Sequence[Message] | None, token_ids: Sequence[int] | None, max_tokens: int | None, stop: Sequence[str]
) -> None:
    """Checks the arguments of `generate`, which programs pass on as they got them; messages are checked elsewhere.

    Raises:
        InvalidRequest: one is not what it must be; names it and its value.
    """
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise InvalidRequest(f"max_tokens is {max_tokens!r:.80}: expected a number from 1")
    if (messages is None) == (token_ids is None):
        raise InvalidRequest("generate takes either messages or token_ids")
    if (
        isinstance(stop, str)
        or not isinstance(stop, Sequence)
        or not all(isinstance(text, str) and text for text in stop)
    ):
        raise InvalidRequest(f"stop is {stop!r:.80}: expected a list of texts")
    if len(stop) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stop)} texts: expected {MAX_STOPS} at most")
    if messages is None:
        _require_token_ids(token_ids)


def _require_token_ids(token_ids: Sequence[int] | None) -> None:
    if not isinstance(token_ids, Sequence) or not token_ids:
        raise InvalidRequest(f"token_ids is {token_ids!r:.80}: expected a list of at least one token id")
    if not all(type(token) is int and 0 <= token < MAX_TOKEN_ID for token in token_ids):
        raise InvalidRequest(f"token_ids is {token_ids!r:.80}: expected integers from 0")


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
