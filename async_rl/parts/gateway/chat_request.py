"""The body of a chat completion: what of it the policy is asked, what is refused, and what is ignored; for `server`.

Sampling is the run's (`ignored_fields`). What would change what a client gets (several choices, calls that it forces)
is refused.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict

from async_rl.parts.gateway.api_error import bad_request, unsupported
from async_rl.parts.gateway.turn_request import TurnRequest, require_free_choice, validated


class ChatRequest(BaseModel):
    """The fields that are honoured; all others are in `model_extra`."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    messages: list[dict[str, Any]]
    model: str = "policy"
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def turn(self) -> TurnRequest:
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return TurnRequest(self.messages, None if self.tool_choice == "none" else self.tools, most, stop, "messages")

    @property
    def includes_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))


def read_chat_request(body: bytes) -> ChatRequest:
    """The request in a body of JSON.

    Raises:
        ApiError: it is none, or asks for what cannot be had.
    """
    request = validated(ChatRequest, body)
    if request.n not in (None, 1):
        raise unsupported("n", f"n is {request.n}: expected 1; send a request for each choice")
    require_free_choice(request.tool_choice)
    for name in ("functions", "function_call"):
        if (request.model_extra or {}).get(name) is not None:
            raise unsupported(name, f"{name} is given: expected tools and tool_choice, which replace it")
    for number, tool in enumerate(request.tools or ()):
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            where = f"tools[{number}]"
            raise bad_request(f"{where} is {tool!r:.80}: expected type 'function', and a function with a name", where)
    return request
