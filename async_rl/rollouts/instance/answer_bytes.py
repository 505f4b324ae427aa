"""What an instance sends, from bytes to the payloads of events or frames, and from an event's payload to its choices.

A body, an event and a frame have a longest length, so that no instance fills this process's memory.
"""

import json
from collections.abc import AsyncIterator
from typing import Annotated, Protocol

import msgspec

from async_rl.errors import BrokenAnswer
from async_rl.shared.protocol import token_frames

END_OF_EVENT = b"\n\n"
COMMENT = b":"
"""The start of a keep-alive event."""
DONE = b"[DONE]"

_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


# The fields used of large responses: parsed by msgspec in a third of the time that pydantic takes. Without the
# collector of garbage, which would visit every token.
class _Token(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    """Of the generate route (content) or of completions (token_logprobs)."""

    content: list[_Token] | None = None
    token_logprobs: list[float] | None = None


class Span(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


class Choice(msgspec.Struct, gc=False):
    index: int
    finish_reason: str | None = None
    token_ids: list[_TokenId] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[Span] | None = None
    routed_experts: str | None = None


class Event(msgspec.Struct, gc=False):
    choices: list[Choice]


_EVENT = msgspec.json.Decoder(Event)


def event_of(payload: bytes) -> Event:
    """Raises ValueError, or RecursionError, for what is no event."""
    try:
        return _EVENT.decode(payload)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        # Python's own writer has NaN and Infinity, which are no JSON.
        return msgspec.convert(json.loads(payload), Event)


class ByteStream(Protocol):
    """The part of aiohttp's `StreamReader` that is used."""

    def iter_any(self) -> AsyncIterator[bytes]: ...


async def whole_body(content: ByteStream, max_bytes: int, url: str) -> bytes:
    """The complete body that the instance at `url` sends.

    Raises:
        BrokenAnswer: it is longer than `max_bytes`.
    """
    parts: list[bytes] = []
    num_bytes = 0
    async for data in content.iter_any():
        num_bytes += len(data)
        if num_bytes > max_bytes:
            raise BrokenAnswer(f"instance {url}: the body of an answer has no end after {num_bytes} bytes")
        parts.append(data)
    return b"".join(parts)


async def event_payloads(content: ByteStream, max_bytes: int, url: str) -> AsyncIterator[bytes]:
    """The `data:` payloads of the server-sent events of the instance at `url`, up to `[DONE]` or the end of the stream.

    Raises:
        BrokenAnswer: an event does not end within `max_bytes`.
    """
    rest = b""
    async for data in content.iter_any():
        *events, rest = (rest + data).split(END_OF_EVENT)
        if len(rest) > max_bytes:
            raise BrokenAnswer(f"instance {url}: an event of an answer has no end after {len(rest)} bytes")
        for event in events:
            payload = event.strip().removeprefix(b"data:").strip()
            if payload == DONE:
                return
            if payload and not payload.startswith(COMMENT):
                yield payload


async def frame_payloads(content: ByteStream, max_bytes: int, url: str) -> AsyncIterator[bytes]:
    """The payloads of the frames of the instance at `url` (`protocol/token_frames.py`), up to the empty one or
    the end of the stream.

    Raises:
        BrokenAnswer: a frame is longer than `max_bytes`.
    """
    rest = bytearray()
    async for data in content.iter_any():
        rest += data
        begin = 0
        while len(rest) - begin >= token_frames.LENGTH.size:
            (num_bytes,) = token_frames.LENGTH.unpack_from(rest, begin)
            if num_bytes > max_bytes:
                raise BrokenAnswer(f"instance {url}: a frame of an answer has {num_bytes} bytes")
            if not num_bytes:
                return
            start = begin + token_frames.LENGTH.size
            if len(rest) < start + num_bytes:
                break
            begin = start + num_bytes
            yield bytes(memoryview(rest)[start:begin])
        del rest[:begin]


def logprobs_of(choice: Choice) -> list[float]:
    logprobs = choice.logprobs
    if logprobs is None:
        return []
    if logprobs.token_logprobs is not None:
        return logprobs.token_logprobs
    return [token.logprob for token in logprobs.content or ()]
