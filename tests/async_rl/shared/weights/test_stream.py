"""The weight transport between real processes over sockets: exact bytes, equal fingerprints, bounded waits."""

import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from async_rl.errors import ConfigError, PublishError
from async_rl.shared.weights.collectives import make_group
from async_rl.shared.weights.fingerprint import Fingerprint, TensorSpec
from async_rl.shared.weights.messages import buckets
from async_rl.shared.weights.store import StoreServer, join_rendezvous
from async_rl.shared.weights.stream import WeightGroup
from tests.support.stream_receiver import HOST, SECRET, make_tensors
from tests.support.stream_workers import Workers

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    "bucket_bytes", [100, *(pytest.param(size, marks=pytest.mark.nightly) for size in (1, 1 << 20))]
)
def test_two_receivers_get_every_byte_and_the_same_fingerprint(
    bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    add = Fingerprint.add_digest
    monkeypatch.setattr(
        Fingerprint, "add_digest", lambda own, spec, data: (hashed.append(spec.name), add(own, spec, data))[1]
    )
    workers = Workers(2, bucket_bytes)
    workers.tell("receive")
    workers.wait_until_announced()
    sent = workers.group.send(make_tensors(), bucket_bytes)
    assert hashed == [spec.name for spec, _ in make_tensors()], "once, however many receive them"
    assert [pipe.recv() for pipe in workers.pipes] == [(True, sent), (True, sent)]
    workers.group.close()


def test_a_stream_that_cannot_be_sent_to_its_end_is_closed() -> None:
    workers = Workers(1, 1 << 20)
    workers.tell("die")
    workers.processes[0].wait()
    ends = []

    def stream() -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        try:
            while True:
                yield from make_tensors()
        finally:
            ends.append("closed")

    with pytest.raises(PublishError, match="weight broadcast broke") as caught:
        workers.group.send(stream(), 1)
    # The traceback still holds the frames, so nothing but `send` itself has closed it.
    assert caught.tb is not None and ends == ["closed"]


def test_a_receiver_that_dies_ends_the_broadcast_in_a_named_error() -> None:
    workers = Workers(1, 1 << 20)
    workers.tell("die")
    workers.processes[0].wait()
    assert workers.group.wait_accepted(0.0) == [1]
    with pytest.raises(PublishError, match="weight broadcast broke"):
        for _ in range(3):
            workers.group.send(make_tensors(), 1 << 20)


def test_a_receiver_that_stops_amid_a_stream_leaves_the_rendezvous_before_its_neighbours_notice() -> None:
    server = StoreServer(HOST, [SECRET])
    member = join_rendezvous(HOST, server.port, SECRET, 60.0)
    spec, data = TensorSpec("a", "uint8", (2**20,)), torch.zeros(2**20, dtype=torch.uint8)
    with ThreadPoolExecutor(2) as threads:
        meeting = threads.submit(WeightGroup, member, 1, 2, "sockets", 60.0)
        sender = WeightGroup(server.store(60.0), 0, 2, "sockets", 60.0)
        receiver = meeting.result(60.0)
        announcing = threads.submit(receiver.announce, 1)
        sending = threads.submit(sender.send, ((spec, data) for _ in range(100)), 2**20)
        announcing.result(60.0)
        found = receiver.receive([spec] * 100, 2**20)
        next(found)
        close = receiver._collectives.close
        left_first = []

        def close_connections() -> None:
            left_first.append(member.has_ended())
            close()

        receiver._collectives.close = close_connections  # type: ignore[method-assign]
        found.close()
        with pytest.raises(PublishError, match="weight broadcast broke"):
            sending.result(60.0)
    assert left_first == [True] and server.ended == [1]
    sender.close()


def test_a_receiver_that_never_joins_ends_the_rendezvous_in_a_named_error() -> None:
    store = StoreServer(HOST, [SECRET]).store(0.5)
    with pytest.raises(PublishError, match=r"not all 2 members of the weight group met within 0\.5 s"):
        WeightGroup(store, 0, 2, "sockets", 0.5)


def test_a_missing_sender_ends_the_rendezvous_in_a_named_error() -> None:
    with pytest.raises(PublishError, match=r"no weight store at 127\.0\.0\.1:1 .*publish\.master_address"):
        join_rendezvous(HOST, 1, SECRET, timeout_s=0.5)


def test_buckets_hold_at_most_their_size_except_single_large_tensors() -> None:
    specs = [TensorSpec(str(i), "float32", (n,)) for i, n in enumerate((1, 1, 3, 2, 9, 1))]
    cut = [[spec.name for spec in bucket] for bucket in buckets(specs, 16)]
    assert cut == [["0", "1"], ["2"], ["3"], ["4"], ["5"]]


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ConfigError, match="'float31', which torch does not know"):
        _ = TensorSpec("a", "float31", (1,)).dtype


def test_an_accelerators_group_is_made_from_its_own_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """HCCL's group takes (store, rank, size, options) and its options a timeout, as torch_npu documents."""

    class FakeHccl:
        class Options:
            _timeout = timedelta()

        def __init__(self, store: object, rank: int, size: int, options: Options) -> None:
            self.made_with = (store, rank, size, options._timeout)

    module = types.ModuleType("torch_npu._C._distributed_c10d")
    module.ProcessGroupHCCL = FakeHccl  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    server = StoreServer(HOST, [SECRET])
    store = server.store(5.0)
    group = make_group(store, 1, 3, "hccl", timedelta(seconds=5))
    assert group.made_with == (store, 1, 3, timedelta(seconds=5))
    server.close()
