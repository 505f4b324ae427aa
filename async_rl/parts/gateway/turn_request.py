"""What a client's request asks the policy, whichever of OpenAI's APIs it came by; for `line` and `server`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from async_rl.parts.gateway.api_error import bad_request, unsupported
from async_rl.rollouts.agents.messages import Message, Tool

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """`source` is the field of the request that the messages are from, for errors."""

    messages: Sequence[Message]
    tools: Sequence[Tool] | None
    max_tokens: int | None
    stop: Sequence[str]
    source: str


class ApiRequest(Protocol):
    """A request as its API has it."""

    @property
    def stream(self) -> bool | None: ...

    @property
    def model_extra(self) -> dict[str, Any] | None:
        """The fields that nothing reads."""
        ...

    @property
    def turn(self) -> TurnRequest: ...


def validated(kind: type[Body], body: bytes) -> Body:
    """The request in a body of JSON, by the types of its fields.

    Raises:
        ApiError: it is none.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = ".".join(map(str, first["loc"]))
        raise bad_request(f"{param or 'body'}: {first['msg']}", param or None) from None


def require_free_choice(tool_choice: str | Mapping[str, Any] | None) -> None:
    """Refuses a request that demands a call, instead of leaving it to the policy.

    Raises:
        ApiError: it does.
    """
    if tool_choice not in (None, "auto", "none"):
        raise unsupported(
            "tool_choice",
            f"tool_choice is {tool_choice!r:.80}: expected 'auto' or 'none'; a forced call would not be the "
            "policy's own",
        )
