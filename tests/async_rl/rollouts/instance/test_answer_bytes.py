"""However the bytes of an answer arrive, the payloads are the same; none is without end."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from random import Random

import pytest

from async_rl.errors import BrokenAnswer
from async_rl.rollouts.instance.answer_bytes import event_payloads, frame_payloads, whole_body
from async_rl.shared.protocol import token_frames

URL = "http://a:1"
NUM_SCRIPTS = 150


class Bytes:
    """A body that arrives in these parts."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self._parts = parts

    async def iter_any(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part


def payloads_of(parts: Sequence[bytes], max_bytes: int = 10**6) -> list[bytes]:
    async def read() -> list[bytes]:
        return [payload async for payload in event_payloads(Bytes(parts), max_bytes, URL)]

    return asyncio.run(read())


def test_events_are_the_same_however_their_bytes_are_split() -> None:
    rng = Random(0)
    for _ in range(NUM_SCRIPTS):
        events = rng.choices([b'{"a": 1}', b"x", b'{"t": "\xe2\x82\xac"}', b"data: y"], k=rng.randrange(5))
        comment = rng.choice([b"", b": still there\n\n\n\n"])
        body = b"".join(comment + b"data: " + event + b"\n\n" for event in events)
        body += rng.choice([b"data: [DONE]\n\ndata: after the end\n\n", b"data: torn", b""])
        bounds = sorted([0, len(body), *(rng.randint(0, len(body)) for _ in range(rng.randrange(12)))])
        assert payloads_of([body[a:b] for a, b in pairwise(bounds)]) == events
    assert payloads_of([body[i : i + 1] for i in range(len(body))]) == events


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_neither_an_event_nor_a_body_may_be_without_end(size: int) -> None:
    with pytest.raises(BrokenAnswer, match=f"instance {URL}: an event of an answer has no end after"):
        payloads_of([b"x" * size] * 1001, max_bytes=1000)
    assert payloads_of([b"x" * size + b"\n\n"] * 1001, max_bytes=1000) == [b"x" * size] * 1001
    body = whole_body(Bytes([b"x" * size] * (1000 // size)), 1000, URL)
    assert asyncio.run(body) == b"x" * (1000 // size * size)
    with pytest.raises(BrokenAnswer, match=f"instance {URL}: the body of an answer has no end after"):
        asyncio.run(whole_body(Bytes([b"x" * size] * 1001), 1000, URL))


def frames_of(parts: Sequence[bytes], max_bytes: int = 10**6) -> list[bytes]:
    async def read() -> list[bytes]:
        return [payload async for payload in frame_payloads(Bytes(parts), max_bytes, URL)]

    return asyncio.run(read())


def test_frames_are_the_same_however_their_bytes_are_split() -> None:
    rng = Random(0)
    for _ in range(NUM_SCRIPTS):
        frames = [rng.randbytes(rng.choice((1, 4, 300))) for _ in range(rng.randrange(5))]
        body = b"".join(map(token_frames.framed, frames))
        body += rng.choice([token_frames.END + b"after the end", token_frames.framed(b"torn")[:-1], b"\x01\x00", b""])
        bounds = sorted([0, len(body), *(rng.randint(0, len(body)) for _ in range(rng.randrange(12)))])
        assert frames_of([body[a:b] for a, b in pairwise(bounds)]) == frames
    assert frames_of([body[i : i + 1] for i in range(len(body))]) == frames


@pytest.mark.parametrize("num_bytes", [1001, 2**31, 2**32 - 1])
def test_a_frame_says_first_how_long_it_is_and_none_is_too_long(num_bytes: int) -> None:
    with pytest.raises(BrokenAnswer, match=f"instance {URL}: a frame of an answer has {num_bytes} bytes"):
        frames_of([token_frames.LENGTH.pack(num_bytes)], max_bytes=1000)
