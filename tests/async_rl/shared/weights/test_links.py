"""Who gets a connection of a chain, and what strangers at its members' sockets can do."""

import json
import secrets
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from async_rl.errors import PublishError
from async_rl.shared.weights.links import connect
from async_rl.shared.weights.store import MAX_STRANGERS, StoreServer, join_rendezvous
from async_rl.shared.weights.store_wire import PROOF_BYTES, NotInvited
from async_rl.shared.weights.stream import WeightGroup
from tests.support.waiting import wait_for

HOST = "127.0.0.1"
SECRET = "of this meeting" * 3
TIMEOUT_S = 60.0


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer(HOST, [SECRET] * 2)
    yield server
    server.close()


def test_whoever_comes_to_a_members_socket_without_its_proof_gets_no_weights_and_keeps_nobody_out(
    server: StoreServer,
) -> None:
    """Silent, with a part of a proof, gone at once, with another rank's proof, and more than it keeps."""
    host = server.store(TIMEOUT_S)
    member = join_rendezvous(HOST, server.port, SECRET, TIMEOUT_S)
    false = join_rendezvous(HOST, server.port, SECRET, TIMEOUT_S)
    false.enter_as(2)
    with ThreadPoolExecutor(1) as thread, ExitStack() as strangers:
        sender = thread.submit(WeightGroup, host, 0, 2, "sockets", TIMEOUT_S)
        wait_for(lambda: host.check(["present/0"]))
        host.set("present/1", "as if it had come")
        wait_for(lambda: host.check(["chain/0"]))
        place = json.loads(host.get("chain/0"))
        for number in range(3 * MAX_STRANGERS):
            stranger = strangers.enter_context(socket.socket(socket.AF_UNIX if number % 2 else socket.AF_INET))
            stranger.connect(f"\0{place['name']}" if number % 2 else (place["address"], place["port"]))
            said = (b"", b"a part", false.proofs()[0][:PROOF_BYTES], bytes(1000))[number % 4]
            with suppress(OSError):
                stranger.sendall(said)
            if number % 5 == 0:
                stranger.close()
        assert not sender.done()
        group = WeightGroup(member, 1, 2, "sockets", TIMEOUT_S)
        sender.result(TIMEOUT_S).close()
        group.close()


def test_whoever_is_in_a_members_place_without_its_proof_gets_no_connection(server: StoreServer) -> None:
    """As one that has taken the port of a member that has gone."""
    host, member = server.store(TIMEOUT_S), join_rendezvous(HOST, server.port, SECRET, TIMEOUT_S)
    member.enter_as(1)
    with ThreadPoolExecutor(1) as thread, socket.create_server((HOST, 0)) as impostor:
        place = {"address": HOST, "port": impostor.getsockname()[1], "name": f"async-rl-{secrets.token_hex(16)}"}
        host.set("chain/0", json.dumps(place))
        joining = thread.submit(connect, member, 1, 2, TIMEOUT_S)
        connection, _ = impostor.accept()
        with connection:
            connection.sendall(bytes(PROOF_BYTES))
            with pytest.raises(NotInvited, match="connected as rank 0 is not who was invited"):
                joining.result(TIMEOUT_S)


RIGHT = {"address": HOST, "port": 9, "name": f"async-rl-{'0' * 32}"}
WRONG = {
    "address": (None, 5, "", "..", "localhost", "a" * 80, "\ud800", [HOST]),
    "port": (None, 0, -1, 65536, 10**4000, 1.5, "x", True),
    "name": (None, "", "\0", "\ud800", "x" * 300, f"../{'0' * 32}"),
}


def false_places() -> Iterator[str | bytes]:
    yield from ("", "x", "{}", "[]", "null", b"\xff\xfe", "[" * 100_000, json.dumps(RIGHT | {"other": 1}))
    yield from (json.dumps(RIGHT | {key: value}) for key, values in WRONG.items() for value in values)


def test_a_member_that_says_a_false_place_is_refused_itself(server: StoreServer) -> None:
    false = join_rendezvous(HOST, server.port, SECRET, TIMEOUT_S)
    false.enter_as(1)
    for place in false_places():
        with pytest.raises(PublishError, match="what a member says of its place is not valid"):
            false.set("chain/1", place)
    with pytest.raises(PublishError, match=r"at 127\.0\.0\.1 says that its place is at 10\.0\.0\.1"):
        false.set("chain/1", json.dumps(RIGHT | {"address": "10.0.0.1"}))
    with pytest.raises(PublishError):
        false.compare_set("chain/1", "", "x")
    assert not server.store(TIMEOUT_S).check(["chain/1"])
    false.set("chain/1", json.dumps(RIGHT))
    assert server.store(TIMEOUT_S).check(["chain/1"])


def test_a_member_whose_local_socket_accepts_nobody_is_reached_by_tcp(server: StoreServer) -> None:
    """As one that has stopped, at which strangers wait."""
    host, member = server.store(TIMEOUT_S), join_rendezvous(HOST, server.port, SECRET, TIMEOUT_S)
    member.enter_as(1)
    name = f"async-rl-{secrets.token_hex(16)}"
    with ExitStack() as opened, ThreadPoolExecutor(1) as thread:
        full = opened.enter_context(socket.socket(socket.AF_UNIX))
        full.bind(f"\0{name}")
        full.listen(0)
        opened.enter_context(socket.socket(socket.AF_UNIX)).connect(f"\0{name}")
        listener = opened.enter_context(socket.create_server((HOST, 0)))
        listener.settimeout(TIMEOUT_S)
        host.set("chain/0", json.dumps({"address": HOST, "port": listener.getsockname()[1], "name": name}))
        joining = thread.submit(connect, member, 1, 2, TIMEOUT_S)
        opened.enter_context(listener.accept()[0]).sendall(host.proofs()[0][PROOF_BYTES:])
        host.set("chain/linked/0", "")
        before, after = joining.result(TIMEOUT_S)
        assert before is not None and before.family == socket.AF_INET and after is None
        before.close()
