"""The producer's end of its connections: who may connect, and what each kind of connection says.

A connection begins with a greeting, `{"secret": ..., "role": "control" | "rollouts", "replica": N}`; the answer has the
clock and the host. Then, in frames of `frames.py`:

    control, one         {"call": name, "arguments": [...]} -> {"done": result} | {"failed": error}
                         meanwhile the same in the other direction
    rollouts, a replica  {"start": iteration}, of the first replica with "version", "first_reserve" and "mini_batches":
                            [[[index, prompt id], ...], ...]
                         -> {"groups": headers, "bytes": of each array}, then these ... {"complete": number of the
                            mini-batch} | {"failed": error, "index": of its prompt, or NO_PROMPT}
                         {"begin": [[index, first rollout], ...]}: trains these now, or waits
                         {"cancel": [index, ...]}
                         {"leave": waits} -> {"left": null}; that of the first replica ends the batch
"""

import asyncio
import hmac
import logging
import queue
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from async_rl.errors import AsyncRLError, LeaderFailed, ProducerLost
from async_rl.producer.batch_rollout import BatchRollout
from async_rl.producer.connection import ALIVE, boot_id
from async_rl.producer.frames import (
    NO_PROMPT,
    Carry,
    Message,
    answer_to,
    call_message,
    error_as_data,
    error_from_data,
    frame,
    read_frame,
)

log = logging.getLogger(__name__)

GREETING_TIMEOUT_S = 5.0
GREETING_BYTES = 2**12
MAX_STRANGERS = 64
"""Connections without a greeting; for a further one the oldest ends."""

ALIVE_S = 1.0

StartBatch = Callable[[int, Message], Awaitable[BatchRollout]]
"""(replica, its message) -> the running batch: the first replica's message starts it, the others wait for that."""


class ProducerServer:
    """Accepts the ranks of one trainer, on the event loop.

    Args:
        secret: what every greeting must have.
        start_batch: called for each batch that a replica asks for.
    """

    def __init__(self, secret: str, start_batch: StartBatch) -> None:
        self._secret = secret
        self._start_batch = start_batch
        self._strangers: dict[asyncio.Task[Any], None] = {}
        """Connections without a greeting, the oldest first."""
        self.control: queue.SimpleQueue[ControlLink] = queue.SimpleQueue()
        """The connection of the main rank, for the main thread."""
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[Any]] = set()

    async def start(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._accept, sock=listener)

    async def stop(self) -> None:
        """Ends all connections, and what they rolled out."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if (greeting := await self._greeting(task, reader)) is None:
                return
            _send(writer, {"clock_s": time.monotonic(), "boot_id": boot_id()})
            alive = asyncio.create_task(_say_alive(writer))
            try:
                if greeting["role"] == "control":
                    await self._serve_control(reader, writer)
                else:
                    await _LeaderLink(reader, writer, greeting["replica"], self._start_batch).serve()
            finally:
                alive.cancel()
        except (ConnectionError, asyncio.IncompleteReadError):
            # The rank has ended, and says why itself.
            pass
        except asyncio.CancelledError:
            # By `stop`, or for a later stranger; asyncio's streams would log a cancelled task as a fault.
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _greeting(self, task: asyncio.Task[Any], reader: asyncio.StreamReader) -> Message | None:
        """Of one of ours; None of a stranger, which gets no answer."""
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
        self._strangers[task] = None
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                greeting, _ = await read_frame(reader, GREETING_BYTES)
        except (ValueError, TimeoutError):
            return None
        finally:
            self._strangers.pop(task, None)
        is_ours = hmac.compare_digest(str(greeting.get("secret")).encode(), self._secret.encode())
        return greeting if is_ours else None

    async def _serve_control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = ControlLink(asyncio.get_running_loop(), writer)
        self.control.put(link)
        try:
            while True:
                message, _ = await read_frame(reader)
                link.receive(message)
        finally:
            link.receive(None)


class ControlLink:
    """The main rank's connection, as the producer's main thread uses it: it takes calls, and may ask while it works on
    one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, writer: asyncio.StreamWriter) -> None:
        self._loop = loop
        self._writer = writer
        self._calls: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    def receive(self, message: Message | None) -> None:
        """A message that arrived; None: none will any more."""
        if message is None or "call" not in message:
            self._answers.put(message)
        if message is None or "call" in message:
            self._calls.put(message)

    def serve(self, work: Carry) -> None:
        """Carries out one call after the other, until the connection ends."""
        while (call := self._calls.get()) is not None:
            self._say(answer_to(call, work)[0])

    def ask(self, name: str, arguments: Sequence[Any]) -> Any:
        """Has the main rank do something while it waits for its call.

        Raises:
            AsyncRLError: as it was raised there.
            LeaderFailed: it failed there by an internal error.
            ProducerLost: the main rank is gone; nobody is left to be told.
        """
        self._say(call_message(name, arguments))
        match self._answers.get():
            case {"done": result}:
                return result
            case {"failed": error}:
                raise error_from_data(error, "the main training rank", LeaderFailed)
        raise ProducerLost("the main training rank has left in the middle of a publish")

    def _say(self, message: Message) -> None:
        pieces = frame(message)
        with suppress(RuntimeError):  # The loop has ended, and with it all connections.
            self._loop.call_soon_threadsafe(self._writer.writelines, pieces)


class _LeaderLink:
    """The connection of one replica's leader."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, replica: int, start_batch: StartBatch
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._replica = replica
        self._start_batch = start_batch
        self._batch: BatchRollout | None = None
        self._sending: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        try:
            while True:
                message, _ = await read_frame(self._reader)
                await self._note(message)
        finally:
            if self._leaving is not None:
                self._leaving.cancel()
            await self._end_batch(waits=False)

    async def _note(self, message: Message) -> None:
        match message:
            case {"start": _}:
                assert self._batch is None, "the batch before has been left"
                try:
                    self._batch = await self._start_batch(self._replica, message)
                except Exception as error:
                    # Another producer could not begin it either.
                    if not isinstance(error, AsyncRLError):
                        log.exception("the batch of iteration %s cannot be begun", message["start"])
                    _send(self._writer, {"failed": error_as_data(error), "index": NO_PROMPT})
                    return
                self._sending = asyncio.create_task(self._send_groups(self._batch))
            case {"begin": keys}:
                if self._batch is not None:
                    self._batch.begin(self._replica, [(index, first_rollout) for index, first_rollout in keys])
            case {"cancel": indices}:
                if self._batch is not None:
                    self._batch.cancel(self._replica, indices)
            case {"leave": True}:
                self._leaving = asyncio.create_task(self._leave(waits=True))
            case {"leave": False}:
                if self._leaving is None:
                    self._leaving = asyncio.create_task(self._leave(waits=False))
                elif self._batch is not None:
                    self._batch.hurry()

    async def _send_groups(self, batch: BatchRollout) -> None:
        try:
            async for message, parts in batch.messages(self._replica):
                _send(self._writer, message, parts)
                # What the rank does not take waits here as groups.
                await self._writer.drain()
        except ConnectionError:
            return  # The rank is gone, as the reader of its connection learns, too.
        except Exception as error:
            # The rank would wait for them, beside signs of life, for good; another producer could not send them either.
            log.exception("the groups of replica %d cannot be sent", self._replica)
            _send(self._writer, {"failed": error_as_data(error), "index": NO_PROMPT})

    async def _leave(self, *, waits: bool) -> None:
        await self._end_batch(waits=waits)
        self._leaving = None
        _send(self._writer, {"left": None})

    async def _end_batch(self, *, waits: bool) -> None:
        if self._batch is not None:
            if self._replica == 0:
                await self._batch.leave(waits=waits)
            self._batch = None
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
            self._sending = None


def _send(writer: asyncio.StreamWriter, message: Message, parts: Sequence[bytes | memoryview] = ()) -> None:
    writer.writelines(frame(message, parts))


async def _say_alive(writer: asyncio.StreamWriter) -> None:
    while True:
        await asyncio.sleep(ALIVE_S)
        if writer.transport.get_write_buffer_size() == 0:
            _send(writer, {ALIVE: True})
