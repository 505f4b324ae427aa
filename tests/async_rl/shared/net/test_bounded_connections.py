"""Connections of strangers, against our real servers over real sockets."""

import asyncio
import re
import resource
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from aiohttp import web

from async_rl.config.pool_section import PoolSection
from async_rl.rollouts.fleet.server import FleetServer
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.net import bounded_connections, bounded_site
from async_rl.shared.net.bounded_connections import first_reserved, max_waiting
from async_rl.shared.net.bounded_http import BoundedHttp
from async_rl.shared.net.bounded_site import BoundedSite
from async_rl.shared.net.listener import listen, url_for_others
from tests.support import ROOT
from tests.support.parts import needs_part
from tests.support.synthetic_run import SyntheticRun
from tests.support.tiers import by_day
from tests.support.waiting import wait_for

HALF = b"POST /fleet/register HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"
WORDS = {
    "silent": b"",
    "half a header": b"GET /fleet HT",
    "half a body": HALF,
    "kept alive": b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n",
}
SERVERS = ("fleet endpoint", *(pytest.param(part, marks=needs_part(part)) for part in ("gateway", "dashboard")))


@pytest.fixture(params=SERVERS)
def url(
    request: pytest.FixtureRequest,
    loop: EventLoopThread,
    make_pool: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[], str]]:
    """Starts a server, after what a test sets, and says where it is."""
    ends: list[Callable[[], object]] = []

    def start() -> str:
        if request.param == "gateway":
            from tests.support.gateway_rig import GatewayRig

            monkeypatch.setattr("async_rl.parts.gateway.gateway.IDLE_S", bounded_connections.SILENCE_S)
            rig = GatewayRig(loop, lambda context, seed: "yes")
            ends.append(rig.close)
            return rig.gateway.url
        if request.param == "dashboard":
            from async_rl.parts.dashboard.__main__ import DashboardServer
            from async_rl.parts.dashboard.page import Dashboard

            listener = listen("the dashboard", "127.0.0.1", 0, None)
            server = DashboardServer(Dashboard([]), listener)
            loop.run(server.__aenter__())
            ends.append(lambda: loop.run(server.__aexit__(None, None, None)))
            return url_for_others(listener)
        fleet = FleetServer(make_pool("http://10.0.0.1:8000"), PoolSection(), None, None, "127.0.0.1")
        loop.run(fleet.start())
        ends.append(lambda: loop.run(fleet.stop()))
        return fleet.url

    yield start
    for end in ends:
        end()


@pytest.fixture
def strangers() -> Iterator[Callable[[str, bytes], socket.socket]]:
    opened: list[socket.socket] = []

    def connect(url: str, words: bytes) -> socket.socket:
        parts = urlsplit(url)
        opened.append(socket.create_connection((parts.hostname, parts.port), 20))
        opened[-1].sendall(words)
        return opened[-1]

    yield connect
    for each in opened:
        each.close()


def is_open(connection: socket.socket) -> bool:
    connection.settimeout(0)
    try:
        while connection.recv(4096):
            pass
        return False
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def answers(url: str) -> bool:
    """Whatever it says of a path that all have, or none."""
    try:
        with urllib.request.urlopen(url + "/dashboard/", timeout=60) as answer:
            return answer.status < 500
    except urllib.error.HTTPError as error:
        return error.code < 500


@pytest.mark.parametrize("words", WORDS)
def test_strangers_do_not_keep_others_out_however_many_they_are(
    words: str,
    url: Callable[[], str],
    strangers: Callable[[str, bytes], socket.socket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounded_connections, "max_waiting", lambda: 20)
    monkeypatch.setattr(bounded_connections, "SILENCE_S", 60.0)
    where = url()
    made = []
    for _ in range(15):
        made += [strangers(where, WORDS[words]) for _ in range(10)]
        assert answers(where)
    assert sum(map(is_open, made)) <= 40, "nobody's request was on the way"
    assert is_open(made[-1]), "the oldest ones had to go"
    monkeypatch.setattr(bounded_connections, "GRACE_S", 0.0)
    for _ in range(60):
        assert answers(where)
    assert sum(map(is_open, made)) <= 20


def test_requests_that_are_being_answered_are_not_bounded(
    url: Callable[[], str], strangers: Callable[[str, bytes], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy instance has more streams than strangers may have connections."""
    monkeypatch.setattr(bounded_connections, "max_waiting", lambda: 2)
    monkeypatch.setattr(bounded_connections, "GRACE_S", 0.0)
    for kind in (BoundedHttp, bounded_site._Connection):
        monkeypatch.setattr(kind, "waits", False)
    where = url()
    made = [strangers(where, b"") for _ in range(50)]
    assert answers(where)
    assert all(map(is_open, made))


def test_the_last_descriptors_are_no_connections(
    url: Callable[[], str], strangers: Callable[[str, bytes], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = url()
    assert answers(where)
    monkeypatch.setattr(bounded_connections, "first_reserved", lambda: 0)
    refused = strangers(where, b"")
    with pytest.raises(OSError):
        answers(where)
    assert not is_open(refused)
    monkeypatch.undo()
    assert answers(where)


@pytest.mark.parametrize("words", WORDS)
def test_who_says_nothing_more_is_let_go(
    words: str,
    url: Callable[[], str],
    strangers: Callable[[str, bytes], socket.socket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounded_connections, "SILENCE_S", 0.3)
    monkeypatch.setattr(bounded_connections, "CHECK_S", 0.1)
    connection = strangers(url(), WORDS[words])
    wait_for(lambda: not is_open(connection))


async def slow_app(scope: Any, receive: Any, send: Any) -> None:
    """Answers when longer has passed than a peer may be silent."""
    if scope["type"] == "http":
        await asyncio.sleep(1.0)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


async def slow_handler(_: web.Request) -> web.Response:
    await asyncio.sleep(1.0)
    return web.Response(text="ok")


@pytest.mark.parametrize("kind", ["uvicorn", "aiohttp"])
def test_a_long_answer_is_no_silence_of_its_client(
    kind: str,
    loop: EventLoopThread,
    strangers: Callable[[str, bytes], socket.socket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its next request would meet the end of the connection."""
    monkeypatch.setattr(bounded_connections, "SILENCE_S", 0.5)
    monkeypatch.setattr(bounded_connections, "CHECK_S", 0.02)
    listener = listen("the test", "127.0.0.1", 0, None)
    app = web.Application()
    app.router.add_get("/", slow_handler)
    site = BoundedSite(web.AppRunner(app), listener)
    server = uvicorn.Server(uvicorn.Config(slow_app, http=BoundedHttp, lifespan="off", log_level="error"))
    serving = loop.submit(server.serve([listener])) if kind == "uvicorn" else None
    if kind == "aiohttp":
        loop.run(site.start())
    connection = strangers(url_for_others(listener), b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    answer = b""
    while not answer.endswith(b"ok"):
        answer += connection.recv(4096)
    time.sleep(0.2)
    assert is_open(connection)
    wait_for(lambda: not is_open(connection))
    server.should_exit = True
    if serving is not None:
        serving.result(60.0)
    loop.run(site.stop())


def test_a_part_of_the_descriptors_is_for_connections_and_another_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = float("inf")
    for soft, most, first in (
        (400, 100, 300),
        (40, 16, 30),
        (10**6, 8192, 750_000),
        (resource.RLIM_INFINITY, 8192, endless),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, soft=soft: (soft, soft))
        assert (max_waiting(), first_reserved()) == (most, first)


@needs_part("dashboard")
@pytest.mark.distributed
@pytest.mark.parametrize("words", by_day(WORDS, ("half a header", "kept alive")))
def test_a_program_with_few_descriptors_answers_and_logs_nothing(
    words: str, tmp_path: Path, strangers: Callable[[str, bytes], socket.socket]
) -> None:
    """As the report had it, with a fifth of the numbers: three times as many connections as it may have files."""
    run = SyntheticRun(tmp_path / "run", num_iterations=1)
    run.write()
    program = [sys.executable, "-m", "async_rl.parts.dashboard", str(run.run_dir), "--port", "0"]
    command = ["sh", "-c", 'ulimit -n 200; exec "$@"', "sh", *program]
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT)
        try:
            assert process.stdout is not None
            where = re.findall(r"http://[^/]*", process.stdout.readline())[0]
            for _ in range(6):
                for _ in range(100):
                    strangers(where, WORDS[words])
                assert answers(where)
            assert process.poll() is None
        finally:
            process.terminate()
            process.wait()
        log.seek(0)
        assert log.read() == ""
