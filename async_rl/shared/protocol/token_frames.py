"""The binary form of a streaming response to a generate request: frames of arrays in place of events of JSON.

A client that understands it names `MEDIA_TYPE` in its Accept header; an instance that serves it responds with this
content type, and others with events. It has what `GenerateChunk` says of tokens, at 8 bytes a token.

A frame is its length, 4 bytes, and so many bytes: a `Frame` as MessagePack, or an error body as JSON, after which
nothing follows. The last frame is empty. All numbers are little-endian.
"""

import struct
from typing import Annotated

import msgspec

MEDIA_TYPE = "application/vnd.async-rl.tokens"
LENGTH = struct.Struct("<I")
END = LENGTH.pack(0)
VALUE_BYTES = 4
"""Of a token id, int32, and of a log-prob, float32."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Span(msgspec.Struct, array_like=True, gc=False):
    """As `inference.VersionSpan`."""

    version: str
    start: int
    end: int


class FramedChoice(msgspec.Struct, array_like=True, gc=False):
    """As `inference.GenerateChoice`; its `num_tokens` are the next ones of its frame's arrays. `routed_experts` are the
    bytes of a `.npy` file, without base64."""

    index: int
    num_tokens: Count
    finish_reason: str | None
    weight_versions: list[Span] | None
    routed_experts: memoryview | None = None


class Frame(msgspec.Struct, array_like=True, gc=False):
    """The new tokens of some choices, in their order: int32 token ids, and their float32 log-probs."""

    choices: list[FramedChoice]
    token_ids: memoryview
    logprobs: memoryview


_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Frame)


def framed(data: bytes) -> bytes:
    """A frame: the payload `data` after its length."""
    return LENGTH.pack(len(data)) + data


def encode(frame: Frame) -> bytes:
    """The payload of a frame."""
    return _ENCODER.encode(frame)


def decode(payload: bytes) -> Frame:
    """The frame of a payload.

    Raises:
        ValueError: it is none, or its arrays have other lengths than its choices say.
    """
    frame = _DECODER.decode(payload)
    num_bytes = VALUE_BYTES * sum(choice.num_tokens for choice in frame.choices)
    if not len(frame.token_ids) == len(frame.logprobs) == num_bytes:
        raise ValueError(
            f"choices of {num_bytes} bytes came with {len(frame.token_ids)} of tokens and {len(frame.logprobs)} of "
            "log-probs"
        )
    return frame
