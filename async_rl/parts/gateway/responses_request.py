"""The body of a request of OpenAI's Responses API: what of it the policy is asked, and what is refused; for `server`.

Its items become chat messages, so that a conversation is the same one by either API. Nothing is stored: a request has
its whole history, and what refers to something at the server is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from async_rl.parts.gateway.api_error import bad_request, unsupported
from async_rl.parts.gateway.turn_request import TurnRequest, require_free_choice, validated
from async_rl.rollouts.agents.messages import InvalidRequest, text_of

LOGPROBS = "message.output_text.logprobs"
"""In `include`."""

ROLES = ("user", "assistant", "system", "developer")

STORED: Mapping[str, str] = {
    "previous_response_id": "send the items of the conversation in input",
    "conversation": "send the items of the conversation in input",
    "prompt": "send the text of the prompt in instructions or input",
    "store": "leave it out, or send false",
    "background": "leave it out, or send false",
}
"""Fields that need something stored at the server -> what to do instead."""


class ResponsesBody(BaseModel):
    """The fields that are honoured or refused; all others are in `model_extra`."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    input: Any
    instructions: str | None = None
    model: str = "policy"
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_output_tokens: int | None = None
    include: list[str] | None = None
    stream: bool | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    store: Any = None
    background: Any = None


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """Implements `ApiRequest`."""

    body: ResponsesBody
    turn: TurnRequest

    @property
    def stream(self) -> bool | None:
        return self.body.stream

    @property
    def model_extra(self) -> dict[str, Any]:
        more = [name for name in self.body.include or () if name != LOGPROBS]
        return {**(self.body.model_extra or {}), "include": more}

    @property
    def includes_logprobs(self) -> bool:
        return LOGPROBS in (self.body.include or ())


def read_responses_request(content: bytes) -> ResponsesRequest:
    """The request in a body of JSON.

    Raises:
        ApiError: it is none, or asks for what cannot be had.
    """
    body = validated(ResponsesBody, content)
    for name, remedy in STORED.items():
        if getattr(body, name) not in (None, False):
            raise unsupported(
                name, f"{name} is {getattr(body, name)!r:.80}: expected none, since no response is stored; {remedy}"
            )
    require_free_choice(body.tool_choice)
    most = body.max_output_tokens
    if most is not None and most < 1:
        raise bad_request(f"max_output_tokens is {most}: expected a number from 1", "max_output_tokens")
    tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(body.tools or ())]
    offered = None if body.tool_choice == "none" else tools or None
    return ResponsesRequest(body, TurnRequest(_messages(body), offered, most, (), "input"))


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """In the form of chat completions."""
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise bad_request(
            f"{where} is {tool!r:.80}: expected type 'function' with a name; there are no built-in tools, so let a "
            "function do it",
            where,
        )
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    if not isinstance(items, list) or not items:
        raise bad_request(f"input is {body.input!r:.80}: expected a text, or a list of at least one item", "input")
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    for number, item in enumerate(items):
        where = f"input[{number}]"
        if not isinstance(item, dict):
            raise bad_request(f"{where} is {item!r:.80}: expected an object", where)
        try:
            _add(messages, item, where)
        except InvalidRequest as error:
            raise bad_request(str(error), where) from error
    return messages


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    """Adds an item; the calls of a turn belong to the message before them, which is what the policy said with them."""
    match item.get("type", "message"):
        case "message":
            if item.get("role") not in ROLES:
                raise InvalidRequest(f"{where}.role is {item.get('role')!r:.80}: expected {', '.join(ROLES)}")
            messages.append({"role": item["role"], "content": text_of(item.get("content"), f"{where}.content")})
        case "function_call":
            _require_texts(item, ("call_id", "name", "arguments"), where)
            function = {"name": item["name"], "arguments": item["arguments"]}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": item["call_id"], "type": "function", "function": function})
        case "function_call_output":
            _require_texts(item, ("call_id",), where)
            output = text_of(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
        case "reasoning":
            # What the policy thought is in the recorded tokens.
            pass
        case "item_reference":
            raise InvalidRequest(f"{where} refers to a stored item, and none is: send the item itself")
        case other:
            raise InvalidRequest(
                f"{where}.type is {other!r:.80}: expected message, function_call, function_call_output or reasoning"
            )


def _require_texts(item: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    for name in names:
        if not isinstance(item.get(name), str):
            raise InvalidRequest(f"{where}.{name} is {item.get(name)!r:.80}: expected text")
