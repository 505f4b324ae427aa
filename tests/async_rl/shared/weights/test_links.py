"""Who gets a connection of a chain, and what strangers at its members' sockets can do."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

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
        place = {"address": HOST, "port": impostor.getsockname()[1], "name": "of nobody"}
        host.set("chain/0", json.dumps(place))
        joining = thread.submit(connect, member, 1, 2, TIMEOUT_S)
        connection, _ = impostor.accept()
        with connection:
            connection.sendall(bytes(PROOF_BYTES))
            with pytest.raises(NotInvited, match="connected as rank 0 is not who was invited"):
                joining.result(TIMEOUT_S)
