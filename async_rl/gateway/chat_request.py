"""The body of a chat completion: what of it the policy is asked, what is refused, and what is ignored; for `server`.

Sampling is the run's: what a client asks of it is ignored, and logged once for each kind. What would change what a
client gets (several choices, calls that it forces) is refused.
"""

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from async_rl.gateway.api_error import ApiError, bad_request

log = logging.getLogger(__name__)

NEUTRAL: Mapping[str, Sequence[Any] | None] = {
    "frequency_penalty": (0,),
    "metadata": None,
    "modalities": (["text"],),
    "parallel_tool_calls": None,
    "presence_penalty": (0,),
    "prompt_cache_key": None,
    "response_format": ({"type": "text"},),
    "safety_identifier": None,
    "service_tier": None,
    "store": None,
    "top_p": (1,),
    "user": None,
}
"""Fields that change nothing with any of these values; None: with any value at all."""

IGNORED = 64
"""Kinds of ignored fields that are logged: a client may invent any number of them."""


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
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the policy sees."""
        return None if self.tool_choice == "none" else self.tools

    @property
    def includes_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))


def read_chat_request(body: bytes) -> ChatRequest:
    """The request in a body of JSON.

    Raises:
        ApiError: it is none, or asks for what cannot be had.
    """
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = ".".join(map(str, first["loc"]))
        raise bad_request(f"{param or 'body'}: {first['msg']}", param or None) from None
    if request.n not in (None, 1):
        raise _unsupported("n", f"n is {request.n}: expected 1; send a request for each choice")
    if request.tool_choice not in (None, "auto", "none"):
        raise _unsupported(
            "tool_choice",
            f"tool_choice is {request.tool_choice!r:.80}: expected 'auto' or 'none'; a forced call would not be the "
            "policy's own",
        )
    for name in ("functions", "function_call"):
        if (request.model_extra or {}).get(name) is not None:
            raise _unsupported(name, f"{name} is given: expected tools and tool_choice, which replace it")
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


class IgnoredFields:
    """Logs each kind of field that requests have and the run ignores, once."""

    def __init__(self, temperature: float) -> None:
        self._neutral = {**NEUTRAL, "temperature": (temperature,)}
        self._logged: set[str] = set()

    def note(self, request: ChatRequest) -> None:
        for name, value in (request.model_extra or {}).items():
            if value is None or name in self._logged or len(self._logged) == IGNORED:
                continue
            neutral = self._neutral.get(name, ())
            if neutral is None or value in neutral:
                continue
            self._logged.add(name)
            log.warning(
                "an agent asked for %.40r = %.80r, which is ignored here and in all requests to come: sampling is the "
                "run's own, so that every sample is on-policy (docs/gateway.md)",
                name,
                value,
            )


def _unsupported(param: str, message: str) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, "unsupported_parameter", message, param)
