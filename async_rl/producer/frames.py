"""Frames between the producer and the ranks of its trainer: a message, and bytes that belong to it.

    12 bytes (lengths of both, big-endian: 4 and 8) | the message as MessagePack | the bytes

A message is plain data; tuples arrive as lists. Errors travel as plain data, too.
"""

import asyncio
import logging
import struct
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from async_rl.errors import AsyncRLError, ProducerFailed

log = logging.getLogger(__name__)

LENGTHS = struct.Struct(">IQ")

Message = dict[str, Any]

Carry = Callable[[str, Sequence[Any]], Any]
"""Carries out a call: (name, arguments) -> plain result."""

NO_PROMPT = -1
"""In place of the index of a prompt: a failure of the producer itself."""

encode_message = msgspec.msgpack.Encoder().encode
decode_message = msgspec.msgpack.Decoder(Message).decode


def frame(message: Message, parts: Sequence[bytes | memoryview] = ()) -> list[bytes | memoryview]:
    """The pieces of a frame, to be written one after the other."""
    text = encode_message(message)
    return [LENGTHS.pack(len(text), sum(memoryview(part).nbytes for part in parts)), text, *parts]


async def read_frame(reader: asyncio.StreamReader, max_bytes: int | None = None) -> tuple[Message, bytes]:
    """The next frame.

    Args:
        max_bytes: of a peer that has not said who it is; a longer frame of it is none.

    Raises:
        IncompleteReadError, ConnectionError: the peer is gone.
        ValueError: the bytes are no frame.
    """
    length, num_bytes = LENGTHS.unpack(await reader.readexactly(LENGTHS.size))
    if max_bytes is not None and length + num_bytes > max_bytes:
        raise ValueError(f"a frame of {length + num_bytes} bytes before a greeting")
    try:
        message = decode_message(await reader.readexactly(length))
    except RecursionError as error:
        raise ValueError("a message that is nested too deeply") from error
    return message, await reader.readexactly(num_bytes)


def call_message(name: str, arguments: Sequence[Any]) -> Message:
    return {"call": name, "arguments": arguments}


def answer_to(call: Message, carry: Carry) -> tuple[Message, Exception | None]:
    """The answer to a call, `{"done": result}` or `{"failed": error}`, and the error if it was an internal one."""
    try:
        return {"done": carry(call["call"], call["arguments"])}, None
    except Exception as error:
        # It is the caller's to decide what follows from it.
        is_internal = not isinstance(error, AsyncRLError)
        if is_internal:
            log.exception("%s failed by an internal error", call["call"])
        return {"failed": error_as_data(error)}, error if is_internal else None


def error_as_data(error: BaseException) -> list[Any]:
    """Its class, text, attributes and notes, and the traceback as text."""
    found = {name: value for name, value in vars(error).items() if isinstance(value, str | int | float)}
    attributes = {name: _sendable(value) if isinstance(value, str) else value for name, value in found.items()}
    notes = [_sendable(note) for note in getattr(error, "__notes__", ())]
    trace = _sendable("".join(traceback.format_exception(error)))
    return [type(error).__name__, _sendable(str(error)), attributes, notes, trace]


def _sendable(text: str) -> str:
    """Errors quote what they are about, which may hold lone surrogates."""
    return text.encode(errors="backslashreplace").decode()


def error_from_data(
    data: Sequence[Any], who: str = "the producer", unnamed: type[AsyncRLError] = ProducerFailed
) -> AsyncRLError:
    """The error as `who` raised it; `unnamed` in place of one that is none of ours: an internal mistake."""
    name, text, attributes, notes, trace = data
    kind = next((each for each in _kinds(AsyncRLError) if each.__name__ == name), None)
    if kind is None:
        return unnamed(f"{who} failed by an internal error, {name}: {text}\n{trace}")
    # Not by its constructor: some take more than a text.
    error = kind.__new__(kind, text)
    error.args = (text,)
    vars(error).update(attributes)
    for note in notes:
        error.add_note(note)
    error.add_note(f"raised by {who}:\n{trace}")
    return error


def _kinds(kind: type[AsyncRLError]) -> Iterator[type[AsyncRLError]]:
    """A class of errors and all its subclasses."""
    yield kind
    for each in kind.__subclasses__():
        yield from _kinds(each)
