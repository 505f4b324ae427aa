"""Events go out as they are made; a client that leaves ends the work, and a fault is told as the last event."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Message

from async_rl.errors import AsyncRLError
from async_rl.shared.protocol import token_frames
from inference_service.api.event_stream import END, Disconnected, EventStream, FrameStream, unless_disconnected
from inference_service.engine_interface import OutOfService

SCOPE: dict[str, Any] = {"type": "http"}


class Client:
    """One end of a connection: what it was sent, and when it leaves."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.gone = asyncio.Event()

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


class Work:
    """Chunks, an error at their end if there is one, and whether the stream was closed."""

    def __init__(self, *texts: bytes, error: Exception | None = None, hangs: bool = False) -> None:
        self.texts, self.error, self.hangs = texts, error, hangs
        self.closed = asyncio.Event()

    async def chunks(self) -> AsyncIterator[tuple[bytes, bool]]:
        try:
            for i, text in enumerate(self.texts):
                is_last = i == len(self.texts) - 1 and self.error is None and not self.hangs
                yield text, is_last
            if self.error is not None:
                raise self.error
            if self.hangs:
                await asyncio.Event().wait()
        finally:
            self.closed.set()


async def answer(work: Work, client: Client, kind: type[EventStream] = EventStream) -> None:
    await kind(work.chunks())(SCOPE, client.receive, client.send)  # type: ignore[arg-type]


def test_each_text_is_one_event_and_the_end_goes_with_the_last() -> None:
    async def scenario() -> None:
        client, work = Client(), Work(b'{"a": 1}', b'{"b": 2}')
        await answer(work, client)
        start, *bodies = client.sent
        headers = dict(start["headers"])
        assert start["status"] == 200 and headers[b"content-type"].startswith(b"text/event-stream")
        assert b"content-length" not in headers, "it is not known beforehand"
        assert [body["body"] for body in bodies] == [b'data: {"a": 1}\n\n', b'data: {"b": 2}\n\n' + END]
        assert [body["more_body"] for body in bodies] == [True, False]
        assert work.closed.is_set()

    asyncio.run(scenario())


def test_a_fault_on_the_way_is_the_last_event_and_no_end_follows() -> None:
    async def scenario() -> None:
        client, work = Client(), Work(b"{}", error=OutOfService("the weights broke"))
        await answer(work, client)
        assert END not in client.body and client.sent[-1]["more_body"] is False
        error = json.loads(client.sent[-1]["body"].removeprefix(b"data: "))["error"]
        assert (error["message"], error["code"]) == ("the weights broke", 503)

    asyncio.run(scenario())


def test_frames_are_sent_with_their_length_and_a_fault_is_one_of_them() -> None:
    async def scenario() -> None:
        client, work = Client(), Work(b"abc", b"d")
        await answer(work, client, FrameStream)
        assert dict(client.sent[0]["headers"])[b"content-type"].decode() == token_frames.MEDIA_TYPE
        assert client.body == b"\x03\x00\x00\x00abc" + token_frames.framed(b"d") + token_frames.END
        client, work = Client(), Work(b"abc", error=OutOfService("the weights broke"))
        await answer(work, client, FrameStream)
        _, body = client.body.split(b"abc")
        assert token_frames.LENGTH.unpack(body[:4]) == (len(body) - 4,)
        assert json.loads(body[4:])["error"]["message"] == "the weights broke"

    asyncio.run(scenario())


def test_a_mistake_of_ours_is_raised() -> None:
    async def scenario() -> None:
        work = Work(b"{}", error=KeyError("ours"))
        with pytest.raises(KeyError):
            await answer(work, Client())
        assert work.closed.is_set()

    asyncio.run(scenario())


def test_work_ends_when_its_client_leaves() -> None:
    async def scenario() -> None:
        client, work = Client(), Work(b"{}", hangs=True)
        task = asyncio.create_task(answer(work, client))
        while b"{}" not in client.body:
            await asyncio.sleep(0)
        client.gone.set()
        await task
        # The chunks are closed in the work's own task.
        await asyncio.wait_for(work.closed.wait(), 10)
        assert END not in client.body

    asyncio.run(scenario())


def test_a_result_or_error_is_passed_on_and_a_client_that_left_first_is_told_as_such() -> None:
    async def result() -> int:
        return 5

    async def fault() -> int:
        raise AsyncRLError("x")

    async def never() -> int:
        await asyncio.Event().wait()
        return 0

    async def scenario() -> None:
        assert await unless_disconnected(Client().receive, result()) == 5
        with pytest.raises(AsyncRLError, match="x"):
            await unless_disconnected(Client().receive, fault())
        client = Client()
        client.gone.set()
        with pytest.raises(Disconnected):
            await unless_disconnected(client.receive, never())

    asyncio.run(scenario())
