"""Connections of strangers, against a real endpoint over real sockets."""

import resource
import socket
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest

from async_rl.net import bounded_http
from async_rl.net.bounded_http import BoundedHttp, most_waiting
from tests.support.fleet_endpoint import Endpoint

HALF = b"POST /fleet/register HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"
WORDS = {
    "silent": b"",
    "half a header": b"GET /fleet HT",
    "half a body": HALF,
    "kept alive": b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n",
}


@pytest.fixture
def endpoint(make_pool: Callable[..., object], serve: Callable[..., Endpoint]) -> Endpoint:
    return serve(make_pool("http://10.0.0.1:8000"))


@pytest.fixture
def strangers(endpoint: Endpoint) -> Iterator[Callable[[bytes], socket.socket]]:
    opened: list[socket.socket] = []

    def connect(words: bytes) -> socket.socket:
        parts = urlsplit(endpoint.url)
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


@pytest.mark.parametrize("words", WORDS)
def test_strangers_do_not_keep_others_out_however_many_they_are(
    words: str, endpoint: Endpoint, strangers: Callable[[bytes], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_http, "most_waiting", lambda: 20)
    monkeypatch.setattr(bounded_http, "SILENCE_S", 60.0)
    made = []
    for _ in range(15):
        made += [strangers(WORDS[words]) for _ in range(10)]
        assert endpoint.ask("/fleet")[0] == 200
    assert sum(map(is_open, made)) <= 60, "nobody's request was on the way"
    assert is_open(made[-1]), "the oldest ones had to go"
    monkeypatch.setattr(bounded_http, "GRACE_S", 0.0)
    for _ in range(60):
        assert endpoint.ask("/health")[0] == 200
    assert sum(map(is_open, made)) <= 20


def test_requests_that_are_being_answered_are_not_bounded(
    endpoint: Endpoint, strangers: Callable[[bytes], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy instance has more streams than strangers may have connections."""
    monkeypatch.setattr(bounded_http, "most_waiting", lambda: 2)
    monkeypatch.setattr(BoundedHttp, "waits", False)
    made = [strangers(b"") for _ in range(50)]
    assert endpoint.ask("/fleet")[0] == 200
    assert all(map(is_open, made))


@pytest.mark.parametrize("words", WORDS)
def test_who_says_nothing_more_is_let_go(
    words: str, endpoint: Endpoint, strangers: Callable[[bytes], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_http, "SILENCE_S", 0.3)
    monkeypatch.setattr(bounded_http, "CHECK_S", 0.1)
    connection = strangers(WORDS[words])
    deadline = time.monotonic() + 20
    while is_open(connection):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_part_of_the_descriptors_is_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((400, 100), (40, 16), (10**6, 4096), (resource.RLIM_INFINITY, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, soft=soft: (soft, soft))
        assert most_waiting() == most
