"""Frames and proofs over a pair of sockets: whole in whatever pieces they come, and only for who knows the secret."""

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from async_rl.shared.weights.store_wire import (
    MAX_FRAME_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    REFUSED,
    NotInvited,
    admit,
    enter,
    listen,
    receive_frame,
    send_frame,
    shut,
)

SECRET = "of this meeting"
PATIENCE_S = 60.0


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def soon() -> float:
    return time.monotonic() + PATIENCE_S


class Host:
    """Admits one connection, in a thread; says with which secret it did."""

    def __init__(self, *secrets: str) -> None:
        self.listener = listen("127.0.0.1", 1)
        self.port = int(self.listener.getsockname()[1])
        self.found: list[Any] = []
        self._secrets = secrets or (SECRET,)
        self._thread = threading.Thread(target=self._admit, daemon=True)
        self._thread.start()

    def _admit(self) -> None:
        connection, _ = self.listener.accept()
        with connection:
            try:
                self.found.append(admit(connection, self._secrets, soon()))
            except OSError as error:
                self.found.append(error)

    def end(self) -> Any:
        self._thread.join(PATIENCE_S)
        self.listener.close()
        return self.found[0]


def test_frames_arrive_whole_and_in_order_whatever_the_pieces(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    rng = Random(0)
    bodies = [None, [], {"op": "set", "value": "00" * rng.randrange(3000)}, "€" * 100, list(range(500)), 1.5]
    data = b"".join(struct.pack("!I", len(text)) + text for text in (json.dumps(each).encode() for each in bodies))

    def trickle() -> None:
        at = 0
        while at < len(data):
            size = rng.choice((1, 2, 3, 700))
            theirs.sendall(data[at : at + size])
            at += size

    thread = threading.Thread(target=trickle)
    thread.start()
    assert [receive_frame(ours, soon()) for _ in bodies] == bodies
    thread.join()
    send_frame(theirs, bodies)
    assert receive_frame(ours, None) == bodies


@pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_frame_that_is_too_long_is_refused_before_it_comes(
    pair: tuple[socket.socket, socket.socket], length: int
) -> None:
    pair[1].sendall(struct.pack("!I", length))
    with pytest.raises(ValueError, match=f"a frame of {length} bytes, expected {MAX_FRAME_BYTES} at most"):
        receive_frame(pair[0], soon())


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"nul", b"[" * 100_000], ids=range(5))
def test_a_frame_that_is_no_json_is_a_value_error(pair: tuple[socket.socket, socket.socket], text: bytes) -> None:
    pair[1].sendall(struct.pack("!I", len(text)) + text)
    with pytest.raises(ValueError, match=r"Expecting|decode|nested"):
        receive_frame(pair[0], soon())


@pytest.mark.parametrize("num_bytes", [0, 1, 4, 9])
def test_a_connection_that_ends_amid_a_frame_is_an_os_error(
    pair: tuple[socket.socket, socket.socket], num_bytes: int
) -> None:
    pair[1].sendall((struct.pack("!I", 10) + b"0123456789")[:num_bytes])
    shut(pair[1])
    with pytest.raises(OSError):
        receive_frame(pair[0], soon())


def test_a_deadline_holds_however_slowly_the_bytes_come(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    is_over = threading.Event()

    def trickle() -> None:
        theirs.sendall(struct.pack("!I", 1000))
        while not is_over.wait(0.02):
            theirs.sendall(b" ")

    thread = threading.Thread(target=trickle)
    thread.start()
    begun = time.monotonic()
    with pytest.raises(OSError):
        receive_frame(ours, begun + 0.3)
    is_over.set()
    thread.join()
    assert time.monotonic() - begun > 0.2


def test_who_knows_the_secret_enters_and_both_have_shown_it() -> None:
    for secrets in ((SECRET,), ("another", SECRET), (SECRET, "another")):
        host = Host(*secrets)
        enter("127.0.0.1", host.port, SECRET, soon()).close()
        assert host.end() == SECRET


@pytest.mark.parametrize("secret", ["", "of another meeting", SECRET + " "])
def test_who_does_not_know_it_is_told_so(secret: str) -> None:
    host = Host()
    with pytest.raises(NotInvited, match="this member's secret is of another meeting"):
        enter("127.0.0.1", host.port, secret, soon())
    assert host.end() is None


def test_a_host_that_does_not_know_it_is_found_out() -> None:
    """It lets everybody in, and cannot say so with a proof."""
    listener = listen("127.0.0.1", 1)

    def pretend() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(bytes(NONCE_BYTES))
            connection.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
            connection.sendall(b"x" * PROOF_BYTES)

    thread = threading.Thread(target=pretend, daemon=True)
    thread.start()
    with listener, pytest.raises(NotInvited, match="its own secret is of another meeting"):
        enter("127.0.0.1", int(listener.getsockname()[1]), SECRET, soon())
    thread.join(PATIENCE_S)


def test_a_hosts_own_proof_sent_back_to_it_opens_nothing() -> None:
    """The roles are part of the proofs."""
    one, two = Host(), Host()
    with (
        socket.create_connection(("127.0.0.1", one.port)) as first,
        socket.create_connection(("127.0.0.1", two.port)) as second,
    ):
        nonces = [each.recv(NONCE_BYTES, socket.MSG_WAITALL) for each in (first, second)]
        for each, nonce in zip((first, second), reversed(nonces), strict=True):
            each.sendall(nonce + bytes(PROOF_BYTES))
            assert each.recv(PROOF_BYTES, socket.MSG_WAITALL) == REFUSED
    assert [one.end(), two.end()] == [None, None]


def test_a_stranger_that_says_nothing_holds_a_host_no_longer_than_its_deadline(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    with pytest.raises(OSError):
        admit(pair[0], SECRET, time.monotonic() + 0.1)


def test_nonces_are_never_the_same() -> None:
    seen = set()
    for _ in range(20):
        host = Host()
        with socket.create_connection(("127.0.0.1", host.port)) as connection:
            seen.add(connection.recv(NONCE_BYTES, socket.MSG_WAITALL))
        assert isinstance(host.end(), OSError)
    assert len(seen) == 20
