"""The store of a weight group: who gets in, what a stranger at its port can do, and how waits end."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from async_rl.errors import PublishError
from async_rl.shared.weights import store as weight_store
from async_rl.shared.weights.store import MAX_STRANGERS, StoreServer, join_rendezvous
from async_rl.shared.weights.store_wire import PROOF_BYTES, NotInvited
from async_rl.shared.weights.stream import WeightGroup
from tests.support.lost_store import lose
from tests.support.open_files import room_for_files
from tests.support.waiting import wait_for

HOST = "127.0.0.1"
SECRET = "of this meeting" * 3
TIMEOUT_S = 60.0


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer(HOST, [SECRET] * 4)
    yield server
    server.close()


def test_it_listens_at_the_address_that_was_asked_for_and_nowhere_else() -> None:
    def listening() -> set[tuple[str, int]]:
        return {
            (c.laddr.ip, c.laddr.port) for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN
        }

    before = listening()
    server = StoreServer(HOST, [SECRET])
    assert listening() - before == {(HOST, server.port)}
    server.close()
    assert listening() == before


def test_an_address_of_another_host_is_refused_by_name() -> None:
    with pytest.raises(PublishError, match=r"cannot listen at 203\.0\.113\.7 \(publish\.master_address\)"):
        StoreServer("203.0.113.7", [SECRET])


def test_members_read_what_others_wrote(server: StoreServer) -> None:
    host, member = server.store(TIMEOUT_S), join_rendezvous(HOST, server.port, SECRET, TIMEOUT_S)
    assert member.address == HOST
    member.set("a", b"\x00\xff")
    assert host.get("a") == b"\x00\xff" and host.check(["a"]) and not host.check(["a", "b"])
    assert (member.add("n", 2), host.add("n", 3), member.get("n")) == (2, 5, b"5")
    assert member.compare_set("a", b"other", b"1") == b"\x00\xff"
    assert member.compare_set("a", b"\x00\xff", b"1") == b"1"
    assert host.num_keys() == 2 and member.delete_key("a") and not member.delete_key("a")
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(member.wait, ["late"], timedelta(seconds=TIMEOUT_S))
        host.set("late", "text")
        waiting.result(TIMEOUT_S)
    assert member.get("late") == b"text"


def test_a_wait_ends_in_time_and_with_the_host(server: StoreServer) -> None:
    member = join_rendezvous(HOST, server.port, SECRET, TIMEOUT_S)
    with pytest.raises(PublishError, match=r"no member has said b within 0\.05 s"):
        member.wait(["b"], timedelta(seconds=0.05))
    with ThreadPoolExecutor(2) as threads:
        waits = [threads.submit(end.get, "b") for end in (member, server.store(TIMEOUT_S))]
        started = time.monotonic()
        server.close()
        for wait in waits:
            with pytest.raises(PublishError, match=r"ended by its host|is gone"):
                wait.result(TIMEOUT_S)
    assert time.monotonic() - started < TIMEOUT_S / 2


def test_a_member_learns_of_the_end_without_a_request(server: StoreServer) -> None:
    host, member = server.store(TIMEOUT_S), join_rendezvous(HOST, server.port, SECRET, TIMEOUT_S)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(member.get, "b")
        time.sleep(0.1)
        assert not host.has_ended() and not member.has_ended(), "it is in use"
        host.set("b", "1")
        assert waiting.result() == b"1" and not member.has_ended()
    server.close()
    wait_for(member.has_ended)
    assert host.has_ended() and member.has_ended()
    member.close()
    assert member.has_ended()


@pytest.mark.parametrize("is_called_off", [True, False])
def test_members_that_have_gone_are_not_waited_for_longer_than_the_timeout_or_the_rendezvous(
    server: StoreServer, is_called_off: bool
) -> None:
    size, timeout_s = 5, 60.0 if is_called_off else 5.0
    stores = [lose(join_rendezvous(HOST, server.port, SECRET, timeout_s)) for _ in range(size - 2)]
    stores.append(join_rendezvous(HOST, server.port, SECRET, timeout_s))
    begun = time.monotonic()
    with ThreadPoolExecutor(size) as threads:
        joining = [threads.submit(WeightGroup, s, i, size, "sockets", timeout_s) for i, s in enumerate(stores, start=1)]
        joining.append(threads.submit(WeightGroup, server.store(timeout_s), 0, size, "sockets", timeout_s))
        if is_called_off:
            time.sleep(1.0)
            server.close()
        for each in joining:
            with pytest.raises(
                PublishError,
                match="ended by its host|is gone|was reset|ended the connection" if is_called_off else "within 5 s",
            ):
                each.result()
    # The timeout once, or half of it; three peers are gone.
    assert time.monotonic() - begun < (timeout_s / 2 if is_called_off else 3 * timeout_s)


def test_a_wrong_secret_is_refused_at_once_and_on_both_sides(server: StoreServer) -> None:
    server.store(TIMEOUT_S).set("secret weights", "address of a rank")
    started = time.monotonic()
    with pytest.raises(NotInvited, match=r"this member's secret is of another meeting"):
        join_rendezvous(HOST, server.port, "of another meeting", TIMEOUT_S)
    assert time.monotonic() - started < TIMEOUT_S / 2
    assert len(server._members) == 0
    # A member does not trust a host that only pretends to know the secret.
    with socket.create_server((HOST, 0)) as pretender:

        def pretend() -> None:
            connection, _ = pretender.accept()
            connection.sendall(bytes(32))
            connection.recv(1024)
            connection.sendall(b"x" * 32)

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(NotInvited, match="its own secret is of another meeting"):
            join_rendezvous(HOST, pretender.getsockname()[1], SECRET, TIMEOUT_S)


def test_a_proof_that_was_seen_opens_no_second_connection(server: StoreServer) -> None:
    with socket.create_server((HOST, 0)) as listener:
        seen: list[bytes] = []

        def pass_on() -> None:
            outer, _ = listener.accept()
            with outer, socket.create_connection((HOST, server.port)) as inner:
                outer.sendall(inner.recv(32))
                seen.append(outer.recv(64))
                inner.sendall(seen[0])
                outer.sendall(inner.recv(32))
                while request := outer.recv(4096):
                    inner.sendall(request)
                    outer.sendall(inner.recv(4096))

        threading.Thread(target=pass_on, daemon=True).start()
        member = join_rendezvous(HOST, listener.getsockname()[1], SECRET, TIMEOUT_S)
        member.set("a", "1")
        with socket.create_connection((HOST, server.port)) as replay:
            replay.recv(32)
            replay.sendall(seen[0])
            assert replay.recv(32) == bytes(32) and replay.recv(1) == b"", "refused, and closed"


def test_strangers_learn_nothing_and_keep_no_member_out(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_store, "PROOF_TIMEOUT_S", 0.5)
    server.store(TIMEOUT_S).set("a", "1")
    silent = [socket.create_connection((HOST, server.port)) for _ in range(MAX_STRANGERS + 20)]
    with socket.create_connection((HOST, server.port)) as talker:
        talker.sendall(b"GET / HTTP/1.1\r\n\r\n" * 1000)
        member = join_rendezvous(HOST, server.port, SECRET, TIMEOUT_S)
        assert member.get("a") == b"1" and len(server._members) == 1
    with pytest.raises((DistStoreError, DistNetworkError, RuntimeError)):
        TCPStore(HOST, server.port, is_master=False, timeout=timedelta(seconds=1)).list_keys()
    for each in silent:
        each.settimeout(TIMEOUT_S)
        assert len(each.recv(4096)) in (0, 32), "its nonce at most"
        each.close()
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(WeightGroup, member, 1, 2, "sockets", TIMEOUT_S)
        WeightGroup(server.store(TIMEOUT_S), 0, 2, "sockets", TIMEOUT_S).close()
        other.result(TIMEOUT_S).close()


def test_silent_strangers_keep_no_member_out_for_as_long_as_they_may_be_silent(server: StoreServer) -> None:
    silent = []
    for _ in range(3):
        silent += [socket.create_connection((HOST, server.port)) for _ in range(MAX_STRANGERS)]
        begun = time.monotonic()
        assert join_rendezvous(HOST, server.port, SECRET, TIMEOUT_S).check([])
        assert time.monotonic() - begun < weight_store.PROOF_TIMEOUT_S / 2
    wait_for(lambda: len(server._strangers) <= MAX_STRANGERS)
    for each in silent:
        each.close()


def test_it_accepts_again_when_descriptors_are_free_again(server: StoreServer) -> None:
    with socket.socket() as early:
        with room_for_files(0):
            early.connect((HOST, server.port))
            time.sleep(3 * weight_store.RETRY_S)
        early.settimeout(TIMEOUT_S)
        assert len(early.recv(32)) == 32, "its nonce"
    assert join_rendezvous(HOST, server.port, SECRET, TIMEOUT_S).check([])


def test_a_member_enters_and_writes_as_a_rank_of_its_own_instance_only() -> None:
    server = StoreServer(HOST, ["one", "two", "two"])
    one, second, third = (join_rendezvous(HOST, server.port, secret, TIMEOUT_S) for secret in ("one", "two", "two"))
    for member, others in ((one, (2, 3, 0, 4)), (second, (1,))):
        for rank in others:
            with pytest.raises(PublishError, match=f"cannot be the one of 'lost/{rank}'"):
                member.enter_as(rank)
    with pytest.raises(PublishError, match="is that of no rank"):
        one.proofs()
    for rank, member in enumerate((one, second, third), start=1):
        member.enter_as(rank)
        for key in (
            "0",
            "ipc/record",
            *(f"{of}/{other}" for of in ("chain", "chain/linked", "present") for other in range(4)),
        ):
            if not key.endswith(f"/{rank}"):
                with pytest.raises(PublishError, match=f"rank {rank} of the weight group may not write"):
                    member.set(key, "")
        member.set(f"present/{rank}", "itself")
    with pytest.raises(PublishError, match="which is taken"):
        join_rendezvous(HOST, server.port, "two", TIMEOUT_S).enter_as(3)
    server.close()


def test_what_two_ranks_show_each_other_no_third_one_is_told(server: StoreServer) -> None:
    stores = [server.store(TIMEOUT_S)]
    for rank in range(1, 5):
        stores.append(join_rendezvous(HOST, server.port, SECRET, TIMEOUT_S))
        stores[rank].enter_as(rank)
    shown, expected = zip(*(store.proofs() for store in stores), strict=True)
    places = [slice(PROOF_BYTES * rank, PROOF_BYTES * (rank + 1)) for rank in range(5)]
    for a in range(5):
        assert [shown[a][places[b]] for b in range(5)] == [expected[b][places[a]] for b in range(5)]
        others = [shown[b] + expected[b] for b in range(5) if b != a]
        assert all(sum(shown[a][places[b]] in told for told in others) == (b != a) for b in range(5))
