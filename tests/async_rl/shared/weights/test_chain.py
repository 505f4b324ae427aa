"""A chain of several receivers, each a process: what the sender's link carries, and who fails when."""

import os
import random
import signal
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median

import pytest
import torch
import xxhash

from async_rl.errors import PublishError
from async_rl.shared.weights import links
from async_rl.shared.weights.chain import PIECE_BYTES, Chain
from async_rl.shared.weights.fingerprint import TensorSpec
from async_rl.shared.weights.store import StoreServer, join_rendezvous
from tests.support.fresh_seed import fresh_seed
from tests.support.stream_receiver import HOST, SECRET, make_tensors
from tests.support.stream_workers import Workers

pytestmark = pytest.mark.distributed

BUCKET_BYTES = 1 << 20
TCP_INFO_BYTES_ACKED = 120
"""In Linux's struct tcp_info, 64 bits."""
MODEL_BYTES = sum(spec.num_bytes for spec, _ in make_tensors())


def chain_of(number: int, timeout_s: float) -> list[Chain]:
    """All members, in threads of this process."""
    server = StoreServer(HOST, [SECRET] * (number - 1))
    stores = [server.store(timeout_s)]
    for rank in range(1, number):
        stores.append(join_rendezvous(HOST, server.port, SECRET, timeout_s))
        stores[rank].enter_as(rank)
    with ThreadPoolExecutor(number) as threads:
        return list(threads.map(lambda rank: Chain(stores[rank], rank, number, timeout_s), range(number)))


@pytest.mark.parametrize("is_local", [True, False])
def test_messages_of_any_size_arrive_whole_in_order_and_are_hashed(
    is_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "NAMES_SOCKETS", is_local)
    rng = random.Random(fresh_seed())
    members = chain_of(rng.randint(2, 5), 60.0)
    assert {link.family == socket.AF_UNIX for each in members[1:] if (link := each._before)} == {is_local}
    sizes = [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1]
    sizes += [rng.randrange(3 * PIECE_BYTES) for _ in range(5)]
    rng.shuffle(sizes)
    sent = [torch.frombuffer(bytearray(rng.randbytes(size) or b"."), dtype=torch.uint8)[:size] for size in sizes]
    received = [[torch.empty(size, dtype=torch.uint8) for size in sizes] for _ in members[1:]]
    works = [
        [*(member.broadcast(data, is_hashed=True) for data in own), member.end()]
        for member, own in zip(members, [sent, *received], strict=True)
    ]
    for member, own in zip(members, works, strict=True):
        for work in own:
            member.wait(work)
        digests = [work.digest for work in own[:-1]]
        assert digests == [xxhash.xxh3_128(bytes(data.tolist())).digest() for data in sent]
    assert all(torch.equal(a, b) for own in received for a, b in zip(own, sent, strict=True))
    for member in members:
        member.close()


def test_a_stream_has_ended_when_the_last_member_has_all_of_it() -> None:
    """A small one, which the buffers on the way hold."""
    first, second, last = members = chain_of(3, 60.0)
    byte = torch.ones(1, dtype=torch.uint8)
    first.wait(first.broadcast(byte))
    second.wait(second.broadcast(torch.empty_like(byte)))
    ends = [member.end() for member in (first, second)]
    assert not any(end.ended.wait(0.5) for end in ends)
    for work in (last.broadcast(torch.empty_like(byte)), last.end()):
        last.wait(work)
    for member, end in zip(members, ends, strict=False):
        member.wait(end)
        member.close()
    last.close()


def test_small_messages_do_not_wait_for_acknowledgements_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which come 40 ms later, at the earliest, where a process has nothing to send back."""
    monkeypatch.setattr(links, "NAMES_SOCKETS", False)
    members = chain_of(2, 60.0)
    took_s = []
    for _ in range(30):
        begun = time.monotonic()
        for works in [[*(each.broadcast(torch.zeros(1000, dtype=torch.uint8)) for _ in range(3))] for each in members]:
            assert all(work.ended.wait(60.0) for work in works)
        for each, end in [(each, each.end()) for each in members]:
            each.wait(end)
        took_s.append(time.monotonic() - begun)
    assert median(took_s) < 0.03
    for each in members:
        each.close()


def test_a_neighbour_that_sends_byte_by_byte_is_waited_for_until_the_timeout() -> None:
    timeout_s = 3.0
    first, second = chain_of(2, timeout_s)
    begun = time.monotonic()
    work = second.broadcast(torch.empty(PIECE_BYTES, dtype=torch.uint8))
    byte = torch.ones(1, dtype=torch.uint8)
    while not work.ended.wait(0.1):
        with suppress(RuntimeError):
            first.wait(first.broadcast(byte))
        assert time.monotonic() - begun < 20 * timeout_s
    assert time.monotonic() - begun >= timeout_s
    with pytest.raises(RuntimeError, match="connection from rank 0: timed out"):
        second.wait(work)
    with pytest.raises(RuntimeError, match="connection from rank 0: timed out"):
        second.wait(second.broadcast(byte))
    for member in (first, second):
        member.close()
        with pytest.raises(RuntimeError, match="the group is closed"):
            member.broadcast(byte)


def num_bytes_acknowledged() -> int:
    """Of all that this process has sent by its present TCP connections."""
    total = 0
    for path in Path("/proc/self/fd").iterdir():
        # What is not of TCP, or is closed by now.
        with suppress(OSError):
            if str(path.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("Q", info, TCP_INFO_BYTES_ACKED)[0]
    return total


def test_the_sender_sends_the_weights_once_however_many_receive_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP, as to another host."""
    monkeypatch.setattr(links, "NAMES_SOCKETS", False)
    workers = Workers(3, BUCKET_BYTES)
    workers.tell("receive, stay")
    workers.wait_until_announced()
    before = num_bytes_acknowledged()
    sent = workers.group.send(make_tensors(), BUCKET_BYTES)
    assert [pipe.recv() for pipe in workers.pipes] == [(True, sent)] * 3
    assert MODEL_BYTES <= num_bytes_acknowledged() - before < 1.2 * MODEL_BYTES
    workers.tell("end")
    workers.group.close()


@pytest.mark.parametrize("how", ["kill", "stop", "fail"])
def test_one_amid_the_chain_ends_the_broadcast_for_all_in_time(how: str) -> None:
    """At once where it is gone or has failed, and after the timeout where it has stopped."""
    timeout_s = 2.0 if how == "stop" else 120.0
    workers = Workers(3, BUCKET_BYTES, timeout_s)
    for number, pipe in enumerate(workers.pipes):
        pipe.send("endless, fails" if how == "fail" and number == 1 else "endless")
    workers.wait_until_announced()
    signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

    def without_end() -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        yield from make_tensors()
        if how in signals:
            workers.processes[1].send_signal(signals[how])
        while True:
            yield from make_tensors()

    begun = time.monotonic()
    with pytest.raises(PublishError, match="weight broadcast broke"):
        workers.group.send(without_end(), BUCKET_BYTES)
    workers.group.close()
    for pipe in (workers.pipes[0], workers.pipes[2]):
        assert "weight broadcast broke" in pipe.recv()
    assert time.monotonic() - begun < 60.0, "nobody waits for a timeout of 120 s"
    for process in workers.processes:
        process.kill()
        process.wait()
