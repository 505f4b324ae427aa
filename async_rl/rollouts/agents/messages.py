"""Chat messages in one form, and what makes two of them the same message; for `turn_tree` and the renderers.

Clients send a history back in their own ways: with nulls or without, with other spacing in a call's arguments, without
the reasoning. None of that changes what the policy has said, so none of it may break the recorded run of tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.rollouts.data.row import TEXT_PARTS

Message = Mapping[str, Any]
"""An OpenAI chat message: role, content, and where they apply tool_calls, tool_call_id, name, reasoning_content."""

Tool = Mapping[str, Any]
"""An OpenAI function tool: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call of a function in what was sampled; `arguments` are JSON text, `id` is None where the model gives none."""

    name: str
    arguments: str
    id: str | None


ToolParser = Callable[[Sequence[int]], tuple[list[int], list[ParsedCall]]]
"""Sampled tokens -> those outside of calls, and the calls."""

MessageKey = tuple[Any, ...]
"""Equal for messages that say the same."""

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class InvalidRequest(ValueError):
    """A request to the policy that cannot be served; the message says what was expected."""


def normalized(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages without nulls, with their content as text, and arguments of calls as JSON text.

    Raises:
        InvalidRequest: there is none, or one has no role, or content that is not text.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidRequest(f"messages is {messages!r:.80}: expected a list of at least one chat message")
    return [_normalized(message, f"messages[{number}]") for number, message in enumerate(messages)]


def key_of(message: Message) -> MessageKey:
    """Of a normalized message: role, content, calls, and the call that it answers; not the reasoning."""
    content = message["content"]
    if message["role"] == "assistant":
        # Clients trim what the policy says; what others say is compared as it is.
        content = content.strip()
    calls = tuple(
        (call.get("id"), call["function"]["name"], _canonical(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    )
    return message["role"], content, calls, message.get("tool_call_id")


def key_of_tools(tools: Sequence[Tool] | None) -> str:
    """Equal for equal tools in the same order.

    Raises:
        InvalidRequest: one is no JSON object.
    """
    if tools is None:
        return ""
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidRequest(f"tools is {tools!r:.80}: expected a list of objects with type and function")
    try:
        return json.dumps(list(tools), sort_keys=True) if tools else ""
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"tools cannot be written as JSON: {error}") from error


def num_bytes_of(message: Message) -> int:
    """Of what a normalized message says."""
    calls = (call["function"]["arguments"] for call in message.get("tool_calls", ()))
    texts = (message["content"], message.get("reasoning_content", ""), *calls)
    return sum(len(text.encode(errors="surrogatepass")) for text in texts)


def text_of(content: object, where: str) -> str:
    """The text of a message's content, a text itself or parts of text; `where` names it.

    Raises:
        InvalidRequest: it is something else.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"{where} is {content!r:.80}: expected text")
    for part in content:
        if not (isinstance(part, Mapping) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str)):
            raise InvalidRequest(f"{where} has the part {part!r:.80}: expected parts of text")
    return "".join(part["text"] for part in content)


def _normalized(message: Message, where: str) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(f"{where} is {message!r:.80}: expected an object with a role of {', '.join(ROLES)}")
    plain: dict[str, Any] = {
        "role": ROLES[role],
        "content": text_of(message.get("content"), f"{where}.content"),
    }
    for name in ("tool_call_id", "name", "reasoning_content"):
        if message.get(name) is not None:
            plain[name] = text_of(message[name], f"{where}.{name}")
    if "reasoning_content" not in plain and isinstance(message.get("reasoning"), str):
        plain["reasoning_content"] = message["reasoning"]
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        if not isinstance(calls, Sequence):
            raise InvalidRequest(f"{where}.tool_calls is {calls!r:.80}: expected a list")
        plain["tool_calls"] = [_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)]
    return plain


def _call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} is {call!r:.80}: expected a function with a name and arguments")
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)
    plain = {"type": "function", "function": {"name": function["name"], "arguments": text}}
    return plain if call.get("id") is None else {"id": str(call["id"]), **plain}


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        # The policy may write any number of brackets.
        return arguments
