"""Both ends of a connection between a rank and the producer, over real sockets."""

import asyncio
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import pytest

from async_rl.errors import ConfigError, InstanceRefused, ProducerFailed, ProducerLost, PublishError, WriteFailed
from async_rl.producer import connection as connection_module
from async_rl.producer import server as server_module
from async_rl.producer.client import Control
from async_rl.producer.connection import Connection
from async_rl.producer.frames import (
    LENGTHS,
    Message,
    decode_message,
    encode_message,
    error_as_data,
    error_from_data,
    frame,
)
from async_rl.producer.process import ProducerAddress
from async_rl.producer.server import ControlLink, ProducerServer
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.net.listener import listen

pytestmark = pytest.mark.distributed

SECRET = "secret"
PLACE = ("a", 1)


async def nobody_starts(replica: int, message: Message) -> NoReturn:
    pytest.fail("nobody starts a batch")


@pytest.fixture
def server(loop: EventLoopThread) -> Iterator[ProducerServer]:
    server = ProducerServer(SECRET, nobody_starts)
    yield server
    loop.run(server.stop())


@pytest.fixture
def address(loop: EventLoopThread, server: ProducerServer) -> ProducerAddress:
    listener = listen("the producer", "127.0.0.1", 0, None)
    loop.run(server.start(listener))
    return ProducerAddress(*listener.getsockname()[:2], secret=SECRET)


@pytest.fixture
def serve(server: ProducerServer) -> Iterator[Callable[[Callable[..., Any]], None]]:
    """Has a thread carry out the calls of the main rank."""
    pool = []

    def start(work: Callable[[ControlLink, str, Sequence[Any]], Any]) -> None:
        def run() -> None:
            link = server.control.get()
            link.serve(lambda name, arguments: work(link, name, arguments))

        pool.append(threading.Thread(target=run))
        pool[-1].start()

    yield start
    for thread in pool:
        thread.join(30)
        assert not thread.is_alive()


def raw(address: ProducerAddress, *pieces: bytes) -> socket.socket:
    stranger = socket.create_connection((address.host, address.port), 10)
    for piece in pieces:
        stranger.sendall(piece)
    return stranger


def test_calls_and_what_is_asked_meanwhile_cross_as_plain_data(address: ProducerAddress, serve) -> None:
    def work(link: ControlLink, name: str, arguments: Sequence[Any]) -> Any:
        if name == "publish":
            return [link.ask("score", [arguments[0], [1, 2]]), float("nan")]
        raise ConfigError("no such thing")

    serve(work)
    control = Control(address.connect(30.0))
    asked = []
    result = control.call("publish", "v1", serve=lambda name, arguments: asked.append((name, arguments)) or (3, 4.5))
    assert asked == [("score", ["v1", [1, 2]])] and result[0] == [3, 4.5] and result[1] != result[1]
    with pytest.raises(ConfigError, match="no such thing") as caught:
        control.call("load")
    assert "ConfigError: no such thing" in caught.value.__notes__[-1], "the producer's traceback"
    control.close()


def test_an_error_of_the_main_rank_is_the_producers_to_handle(address: ProducerAddress, serve) -> None:
    def work(link: ControlLink, name: str, arguments: Sequence[Any]) -> Any:
        try:
            link.ask("send", [])
        except PublishError as error:
            return f"handled: {error}"

    def fail(name: str, arguments: Sequence[Any]) -> Any:
        raise PublishError("the group broke")

    serve(work)
    control = Control(address.connect(30.0))
    assert control.call("publish", serve=fail) == "handled: the group broke"
    control.close()


def test_an_internal_error_of_the_main_rank_that_ends_a_call_is_raised_there_as_it_was(
    address: ProducerAddress, serve
) -> None:
    serve(lambda link, name, arguments: link.ask("score", []))

    def fail(name: str, arguments: Sequence[Any]) -> Any:
        raise RuntimeError("device lost")

    control = Control(address.connect(30.0))
    with pytest.raises(RuntimeError, match=r"^device lost$"):
        control.call("publish", serve=fail)
    control.close()


def test_errors_keep_their_class_their_attributes_and_their_notes() -> None:
    refused = InstanceRefused("too long", 400)
    refused.add_note("asked for row0")
    copy = error_from_data(error_as_data(refused))
    assert type(copy) is InstanceRefused and str(copy) == "too long" and copy.status == 400
    assert copy.__notes__[0] == "asked for row0" and copy.may_pass is not copy.status
    assert type(error_from_data(error_as_data(WriteFailed("disk")))) is WriteFailed
    said = decode_message(encode_message({"failed": error_as_data(WriteFailed("of \udc80"))}))
    odd = error_from_data(said["failed"])
    assert "of \\udc80" in str(odd)
    try:
        raise KeyError("deep down")
    except KeyError as error:
        internal = error_from_data(error_as_data(error))
    assert type(internal) is ProducerFailed and "deep down" in str(internal) and "test_errors_keep" in str(internal)


@pytest.mark.parametrize(
    "words",
    [
        (b"GET / HTTP/1.1\r\n\r\n",),
        frame({"role": "control"}),
        frame({"secret": "other", "role": "control"}),
        frame({"secret": SECRET + "\0", "role": "rollouts", "replica": 0}),
        frame({"secret": 7, "role": "control"}),
        (b"\xff" * 12,),
        (b"\0\0\0\4\0\0\0\0\0\0\0\0", b"\xc1\xc1\xc1\xc1"),
        frame({"secret": SECRET, "role": "control", "more": "x" * 2**13}),
        (LENGTHS.pack(4004, 0), b"\x81\xa1a" + b"\x91" * 4000 + b"\x01"),
    ],
    ids=["http", "no secret", "wrong", "longer", "a number", "huge", "no msgpack", "long", "deep"],
)
def test_strangers_get_no_answer_and_the_end_of_their_connection(
    address: ProducerAddress, server: ProducerServer, words: Sequence[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    stranger = raw(address, *map(bytes, words))
    stranger.settimeout(10)
    with suppress(ConnectionResetError):
        assert stranger.recv(100) == b""
    assert server.control.empty()
    assert not caplog.text, "they fill no log"


def test_silent_strangers_are_bounded_and_keep_nobody_out(
    address: ProducerAddress, server: ProducerServer, monkeypatch: pytest.MonkeyPatch, serve
) -> None:
    monkeypatch.setattr(server_module, "GREETING_TIMEOUT_S", 60.0)
    strangers = [raw(address) for _ in range(3 * server_module.MAX_STRANGERS)]
    control = Control(address.connect(5.0))
    assert len(server._strangers) <= server_module.MAX_STRANGERS
    serve(lambda link, name, arguments: name)
    assert control.call("members") == "members"
    control.close()
    for stranger in strangers:
        stranger.close()


def test_a_producer_that_is_gone_or_cannot_be_reached_is_lost(loop: EventLoopThread, address, server) -> None:
    connection = address.connect(30.0, replica=0)
    loop.run(server.stop())
    with pytest.raises(ProducerLost, match=r"has ended|was lost"):
        while connection.receive(10.0) is None:
            pass
    with pytest.raises(ProducerLost, match="cannot be reached"):
        address.connect(30.0)


def connect_to(ours: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever connects to PLACE has this end; a thread of another test that connects elsewhere meanwhile does not."""
    connect = socket.create_connection
    monkeypatch.setattr(
        socket, "create_connection", lambda at, *args, **more: ours if at == PLACE else connect(at, *args, **more)
    )


def test_a_producer_that_hangs_is_lost_and_one_that_only_works_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began_s = time.monotonic()
        with pytest.raises(ProducerLost, match=r"does not answer|has said nothing"):
            Connection(silent.getsockname()[:2], {}, 1.0)
        assert 0.9 < time.monotonic() - began_s < 20
    ours, theirs = socket.socketpair()
    connect_to(ours, monkeypatch)
    monkeypatch.setattr(type(ours), "setsockopt", lambda *_: None, raising=False)
    theirs.sendall(b"".join(frame({"clock_s": 0.0, "boot_id": connection_module.boot_id()})))
    connection = Connection(PLACE, {}, 1.0)
    assert connection.clock_offset_s == 0.0
    for _ in range(6):
        theirs.sendall(b"".join(frame({connection_module.ALIVE: True})))
        assert connection.receive(0.4) is None
    time.sleep(1.5)  # Not waited for: the rank trains.
    assert connection.receive(0.1) is None
    with pytest.raises(ProducerLost, match=r"nothing for trainer.lost_after_s = 1 s"):
        for _ in range(100):
            connection.receive(0.1)
    theirs.close()


def test_frames_arrive_whole_however_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    connect_to(ours, monkeypatch)
    monkeypatch.setattr(type(ours), "setsockopt", lambda *_: None, raising=False)
    monkeypatch.setattr(connection_module, "RECEIVE_BYTES", 7)
    other_host = {"clock_s": time.monotonic() - 100.0, "boot_id": "another"}
    theirs.sendall(b"".join(frame(other_host)))
    connection = Connection(PLACE, {}, 5.0)
    assert connection.clock_offset_s == pytest.approx(100.0, abs=1.0)
    bodies = [os.urandom(size) for size in (0, 1, 12, 13, 1000, 4096)]
    for number, body in enumerate(bodies):
        theirs.sendall(b"".join(frame({"number": number}, [body[:5], memoryview(body)[5:]])))
    for number, body in enumerate(bodies):
        assert connection.receive(5.0) == ({"number": number}, body)
    theirs.close()
    gc.collect()
    with pytest.raises(ProducerLost, match=r"has ended|was lost"):
        connection.receive(5.0)


def test_the_loop_goes_on_when_a_rank_leaves_in_the_middle_of_a_frame(
    address: ProducerAddress, loop: EventLoopThread, serve
) -> None:
    half = b"".join(frame({"secret": SECRET, "role": "rollouts", "replica": 0}))
    leaving = raw(address, half, b"\0\0\0\7")
    leaving.recv(1000)
    leaving.close()
    loop.run(asyncio.sleep(0.1))
    serve(lambda link, name, arguments: name)
    control = Control(address.connect(5.0))
    assert control.call("members") == "members"
    control.close()
