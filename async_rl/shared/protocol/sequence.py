"""POST /async_rl/sequence: control calls to an instance that it carries out one after the other, in one round trip.

A call that is refused, or whose answer is another one than expected, ends the sequence: later calls rest on it.
"""

import json
from http import HTTPStatus
from typing import Any, Literal

from pydantic import Field

from async_rl.shared.protocol.body import Body, StrictBody, Text

MAX_CALLS = 16


class Call(StrictBody):
    """A call as a client would make it alone.

    `body` is JSON. `expected` has fields of the answer and what each has to be, or each entry of it where it is a list,
    of all workers; None for any answer. A call that `may_be_refused` does not end the sequence by that.
    """

    path: str
    method: Literal["GET", "POST"] = "POST"
    body: Text | None = None
    expected: dict[str, bool | str] | None = None
    may_be_refused: bool = False


class Answer(Body):
    """What a call would have got alone."""

    status: int
    body: Text


class SequenceRequest(StrictBody):
    calls: list[Call] = Field(min_length=1, max_length=MAX_CALLS)


class SequenceResponse(Body):
    """The answers of the calls that were carried out."""

    answers: list[Answer] = Field(max_length=MAX_CALLS)


def goes_on(call: Call, answer: Answer) -> bool:
    """Whether a sequence goes on after this answer to the call."""
    if answer.status != HTTPStatus.OK:
        return call.may_be_refused
    return all(_are_all(values_of(answer, field), value) for field, value in (call.expected or {}).items())


def values_of(answer: Answer, field: str) -> list[Any]:
    """What the answer has as `field`, one by one where that is a list; none where it is no JSON object that has it."""
    try:
        body = json.loads(answer.body)
    except (ValueError, RecursionError):
        return []
    value = body.get(field, []) if isinstance(body, dict) else []
    return value if isinstance(value, list) else [value]


def _are_all(found: list[Any], value: Any) -> bool:
    return bool(found) and all(type(each) is type(value) and each == value for each in found)
