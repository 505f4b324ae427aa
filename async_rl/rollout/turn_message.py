"""What was sampled in a turn, as the chat message that its program gets; for `session`."""

import itertools
from collections.abc import Sequence
from typing import Any

from async_rl.rollout.rendering import ParsedCall
from async_rl.types import digest_of


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
    """The text before the first of the texts `stop`."""
    return text[: min((text.index(end) for end in stop if end in text), default=len(text))]
