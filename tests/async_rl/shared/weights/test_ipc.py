"""The hand-over between processes of one host: exact bytes, bounded waits, records that are checked."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.config.pool_section import PublishSection
from async_rl.errors import PublishError
from async_rl.shared.weights import ipc
from async_rl.shared.weights.collectives import MemberFailed
from async_rl.shared.weights.fingerprint import TensorSpec
from async_rl.shared.weights.ipc import FILE_NAME, RECORD, DeviceMemory, HandOver, Record, ipc_backend
from async_rl.shared.weights.sender import WeightSender, WeightSource
from async_rl.shared.weights.store import RendezvousStore, StoreServer, join_rendezvous
from async_rl.shared.weights.stream import WeightGroup
from tests.support import stream_receiver
from tests.support.stream_receiver import HOST, KEY, SECRET, make_tensors

PIECE = 1000
SOON_S = 30.0
"""Far below a hang, far above what a loaded machine takes."""
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "PIECE_BYTES", PIECE)


class Group:
    """A sender and receivers in threads, each with a connection of its own."""

    def __init__(self, num_receivers: int, timeout_s: float = 60.0, doctor: Callable[[bytes], bytes] | None = None):
        self.server = StoreServer(HOST, [SECRET] * num_receivers)
        self.world_size, self.timeout_s = num_receivers + 1, timeout_s
        self.threads = ThreadPoolExecutor(self.world_size)
        self.stores = [self.server.store(timeout_s)]
        self.stores += [join_rendezvous(HOST, self.server.port, SECRET, timeout_s) for _ in range(num_receivers)]
        if doctor is not None:
            get = self.stores[1].get
            self.stores[1].get = lambda key: doctor(get(key)) if key == RECORD else get(key)  # type: ignore[method-assign]
        self.opening = [self.threads.submit(self.open, rank) for rank in range(self.world_size)]

    def open(self, rank: int) -> HandOver:
        if rank:
            # As `WeightGroup` does.
            self.stores[rank].enter_as(rank)
        try:
            return HandOver(self.stores[rank], rank, self.world_size, self.timeout_s, CPU)
        except Exception:
            self.stores[rank].close()
            raise

    @property
    def members(self) -> list[HandOver]:
        return [each.result(SOON_S) for each in self.opening]

    def start(self, rank: int, datas: Sequence[torch.Tensor]) -> Future[None]:
        member = self.members[rank]

        def run() -> None:
            for work in [member.broadcast(data) for data in datas]:
                member.wait(work)

        return self.threads.submit(run)

    def close(self) -> None:
        self.server.close()
        self.threads.shutdown()
        for each in self.opening:
            if each.exception() is None:
                each.result().close()


@pytest.fixture
def group() -> Iterator[Callable[..., Group]]:
    made: list[Group] = []

    def make(*args: Any, **kwargs: Any) -> Group:
        made.append(Group(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("num_receivers", [1, 3])
def test_all_receive_every_byte_of_messages_of_any_size(group: Callable[..., Group], num_receivers: int) -> None:
    one = group(num_receivers)
    sizes = (0, 1, PIECE - 1, PIECE, PIECE + 1, 0, 2 * PIECE, 7 * PIECE + 3, 1)
    sent = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    received = [[torch.zeros_like(data) for data in sent] for _ in range(num_receivers)]
    running = [one.start(0, sent), *(one.start(rank, into) for rank, into in enumerate(received, start=1))]
    for each in running:
        each.result(SOON_S)
    assert all(torch.equal(a, b) for into in received for a, b in zip(into, sent, strict=True))


def test_a_buffer_is_filled_again_only_when_the_slowest_has_copied_it(group: Callable[..., Group]) -> None:
    one = group(2)
    data = torch.randint(0, 256, (5 * PIECE,), dtype=torch.uint8)
    sending, quick = one.start(0, [data]), one.start(1, [torch.zeros_like(data)])
    time.sleep(1.0)
    assert not sending.done() and not quick.done()
    # Two pieces wait in the buffers for rank 2, and the third was not begun.
    assert one.stores[0].check(["ipc/ready/2"]) and not one.stores[0].check(["ipc/ready/3"])
    into = torch.zeros_like(data)
    one.start(2, [into]).result(SOON_S)
    sending.result(SOON_S)
    assert torch.equal(into, data)


def test_the_store_keeps_nothing_of_messages_that_have_arrived(group: Callable[..., Group]) -> None:
    one = group(1)
    assert one.members
    before = one.stores[0].num_keys()
    sending = one.start(0, [torch.zeros(9 * PIECE, dtype=torch.uint8)])
    one.start(1, [torch.zeros(9 * PIECE, dtype=torch.uint8)]).result(SOON_S)
    sending.result(SOON_S)
    assert one.stores[0].num_keys() == before


def test_one_that_never_acknowledges_costs_the_timeout_and_is_named(group: Callable[..., Group]) -> None:
    one = group(2, timeout_s=1.0)
    data = torch.zeros(4 * PIECE, dtype=torch.uint8)
    one.start(1, [data.clone()])
    begun = time.monotonic()
    with pytest.raises(MemberFailed, match=r"rank 2 did not copy piece 1 within 1 s"):
        one.start(0, [data]).result(SOON_S)
    assert 1.0 <= time.monotonic() - begun < SOON_S


@pytest.mark.parametrize("at", ["waiting for its turn", "before it begins"])
def test_one_whose_connection_ends_is_noticed_at_once(group: Callable[..., Group], at: str) -> None:
    one = group(2, timeout_s=600.0)
    data = torch.zeros(4 * PIECE, dtype=torch.uint8)
    one.start(2, [data.clone()])
    if at == "before it begins":
        assert one.members
        one.stores[1].close()
    sending = one.start(0, [data])
    if at != "before it begins":
        time.sleep(0.3)
        one.stores[1].close()
    with pytest.raises(RuntimeError, match="rank 1 ended its connection before it had copied piece 1"):
        sending.result(SOON_S)


def test_the_end_of_the_rendezvous_ends_all_waits(group: Callable[..., Group]) -> None:
    one = group(2, timeout_s=600.0)
    data = torch.zeros(4 * PIECE, dtype=torch.uint8)
    sending, receiving = one.start(0, [data]), one.start(1, [data.clone()])
    time.sleep(0.3)
    one.server.close()
    with pytest.raises(RuntimeError, match="ended by its host"):
        sending.result(SOON_S)
    with pytest.raises(PublishError):
        receiving.result(SOON_S)


def num_mapped() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count(FILE_NAME)


def test_a_closed_group_sends_nothing_and_has_nothing_mapped(group: Callable[..., Group]) -> None:
    before = num_mapped()
    members = group(1).members
    assert num_mapped() == before + 2
    for member in members:
        member.close()
        member.close()
        with pytest.raises(RuntimeError, match="the group is closed"):
            member.broadcast(torch.zeros(1, dtype=torch.uint8))
    assert num_mapped() == before


def test_nobody_can_open_the_file_once_all_have_mapped_it(group: Callable[..., Group]) -> None:
    assert group(1).members and num_mapped() >= 2
    open_files = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert open_files and not any(FILE_NAME in name for name in open_files)


FORGED: dict[str, tuple[dict[str, Any], str]] = {
    "no memory": ({"memory": None}, "not valid"),
    "a field too many": ({"code": "x"}, "not valid"),
    "an unknown kind": ({"memory": {"kind": "tpu"}}, "not valid"),
    "a process below 1": ({"memory": {"kind": "cpu", "pid": 0, "fd": 3}}, "not valid"),
    "a path": ({"memory": {"kind": "cpu", "pid": 1, "fd": "../../etc/passwd"}}, "not valid"),
    "another host": ({"boot_id": "elsewhere"}, "needs one host"),
    "another size": ({"piece_bytes": PIECE - 1}, "has 2000 bytes, its record says 1998"),
    "another token": ({"token": "AAAAAAAAAAAAAAAAAAAAAA=="}, "not the sender's buffers"),
    "a short token": ({"token": "AAAA"}, "not valid"),
    "a file that is another": ({"memory": {"kind": "cpu", "pid": os.getpid(), "fd": 0}}, "not the sender's file"),
    "a process that is gone": ({"memory": {"kind": "cpu", "pid": 2**22 + 1, "fd": 0}}, "No such file"),
}
DEVICE = {
    "kind": "cpu",
    "device": "GPU-1",
    "handle": "AAAA",
    "num_bytes": 2 * PIECE,
    "offset_bytes": 0,
    "ref_counter": "L3RvcmNoXzE=",
    "ref_counter_offset": 0,
    "event": "AAAA",
    "event_sync_required": True,
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_record_is_refused_by_the_receiver_and_ends_the_meeting(
    group: Callable[..., Group], name: str
) -> None:
    changes, message = FORGED[name]
    one = group(1, timeout_s=600.0, doctor=lambda record: json.dumps(json.loads(record) | changes).encode())
    with pytest.raises(PublishError, match=message):
        one.opening[1].result(SOON_S)
    with pytest.raises(RuntimeError, match="rank 1 ended its connection before it had copied piece 0"):
        one.opening[0].result(SOON_S)


@pytest.mark.parametrize(
    "field, value",
    [
        ("kind", "cpu"),
        ("handle", ""),
        ("handle", "*"),
        ("offset_bytes", -1),
        ("ref_counter", "Li4vLi4vZXRj"),
        ("ref_counter_offset", -1),
        ("event_sync_required", "?"),
        ("device", ""),
        ("more", 1),
    ],
)
def test_every_field_of_a_devices_handle_is_checked(field: str, value: object) -> None:
    given = DEVICE | {"kind": "cuda"}
    assert DeviceMemory.model_validate(given).ref_counter == b"/torch_1"
    with pytest.raises(ValueError, match=field):
        DeviceMemory.model_validate(given | {field: value})


UUIDS = ["GPU-0", "GPU-1", "GPU-2"]
SHARED = (b"\x00handle\xff", 2 * PIECE, 512, b"/torch_12_34_0", 7, b"event\x00", True)
"""What `_share_cuda_` of torch 2.13 returns after the device, and `_new_shared_cuda` takes after it."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """A fake of torch's functions on a host with three GPUs: memory is the CPU's. Yields what was opened."""
    opened: list[tuple[Any, ...]] = []
    storage = torch.zeros(2 * PIECE, dtype=torch.uint8).untyped_storage()
    empty = torch.empty

    def open_shared(*given: Any) -> torch.UntypedStorage:
        opened.append(given)
        return storage

    monkeypatch.setattr(
        torch,
        "empty",
        lambda *a, **k: (
            empty(0, dtype=torch.uint8).set_(storage, 0, (2 * PIECE,), (1,))
            if k["device"].type == "cuda"
            else empty(*a, **k)
        ),
    )
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda self: (1, *SHARED))
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_shared)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: types.SimpleNamespace(uuid=UUIDS[d.index]))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda d: types.SimpleNamespace(synchronize=lambda: None))
    yield opened
    ipc._exported.cache_clear()


def opens(store: RendezvousStore) -> tuple[HandOver, HandOver]:
    """The sender on GPU 1, and a receiver on GPU 0 of those it sees."""
    with ThreadPoolExecutor(1) as threads:
        sender = threads.submit(HandOver, store, 0, 2, 5.0, torch.device("cuda", 1))
        return HandOver(store, 1, 2, 5.0, torch.device("cuda", 0)), sender.result(SOON_S)


def test_a_cuda_handle_goes_through_the_store_byte_for_byte_and_is_opened_on_the_same_device(
    cuda: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StoreServer(HOST, [SECRET]).store(5.0)
    # The receiver sees the devices in another order.
    names = iter([*UUIDS[1:2], "GPU-9", "GPU-1", "GPU-0"])
    monkeypatch.setattr(ipc, "_name_of", lambda device: next(names))
    opens(store)
    assert cuda == [(1, *SHARED)]
    assert Record.model_validate_json(store.get(RECORD)).memory.kind == "cuda"


def test_a_device_that_the_receiver_does_not_see_is_named(cuda: list[tuple[Any, ...]]) -> None:
    record = DeviceMemory.model_validate(DEVICE | {"kind": "cuda", "device": "GPU-7"})
    with pytest.raises(RuntimeError, match=r"device GPU-7 is not among .*\['GPU-0', 'GPU-1', 'GPU-2'\]"):
        ipc._imported(record, 2 * PIECE)
    assert not cuda


def test_a_process_exports_the_buffers_of_a_device_once(cuda: list[tuple[Any, ...]]) -> None:
    device = torch.device("cuda", 1)
    assert ipc._exported(device, 2 * PIECE) is ipc._exported(device, 2 * PIECE)


def test_an_npu_is_known_by_the_number_that_made_it_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    name_of: Callable[[Any], str] = ipc._name_of
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4, 6")
    assert [name_of(types.SimpleNamespace(type="npu", index=i)) for i in (0, 1)] == ["4", "6"]
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES")
    assert name_of(types.SimpleNamespace(type="npu", index=1)) == "1"


def test_a_sender_invites_to_it_between_its_own_kind_of_devices() -> None:
    assert [ipc_backend(backend) for backend in ("sockets", "nccl", "hccl")] == ["cpu_ipc", "cuda_ipc", "npu_ipc"]
    source = WeightSource([spec for spec, _ in make_tensors()], lambda: iter(make_tensors()))
    with closing(WeightSender(source, PublishSection(transport="ipc"), "run")) as sender:
        (info,) = sender.form([HOST], [1]).infos
    assert info["backend"] == "cpu_ipc" and info["bucket_bytes"] == 64 * 2**20


# Weight groups between processes


class Receivers:
    """Processes that receive one update of `make_tensors` each, as workers of an instance do, and this one's end."""

    def __init__(self, number: int, timeout_s: float, bucket_bytes: int = 1 << 20) -> None:
        self.server = StoreServer(HOST, [SECRET] * number)
        self.pipes: list[Connection] = []
        self.processes = []
        with Listener(authkey=KEY) as listener:
            for rank in range(1, number + 1):
                words = [str(listener.address), self.server.port, rank, number + 1, bucket_bytes, timeout_s, "cpu_ipc"]
                command = [sys.executable, "-m", stream_receiver.__name__, *map(str, words)]
                self.processes.append(subprocess.Popen(command))
                self.pipes.append(listener.accept())
        self.group = WeightGroup(self.server.store(timeout_s), 0, number + 1, "cpu_ipc", timeout_s)
        self.bucket_bytes = bucket_bytes

    def receive(self) -> None:
        for pipe in self.pipes:
            pipe.send("receive")
        assert not self.group.wait_accepted(SOON_S)

    def close(self) -> None:
        self.group.close()
        self.server.close()
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def receivers() -> Iterator[Callable[..., Receivers]]:
    made: list[Receivers] = []

    def make(*args: Any) -> Receivers:
        made.append(Receivers(*args))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.distributed
@pytest.mark.parametrize("bucket_bytes", [100, 1 << 20])
def test_a_weight_group_passes_odd_sizes_and_dtypes_with_one_fingerprint(
    receivers: Callable[..., Receivers], bucket_bytes: int
) -> None:
    some = receivers(2, 60.0, bucket_bytes)
    some.receive()
    sent = some.group.send(make_tensors(), bucket_bytes)
    assert [pipe.recv() for pipe in some.pipes] == [(True, sent), (True, sent)]


def endless() -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    while True:
        yield from make_tensors()


@pytest.mark.distributed
def test_a_killed_receiver_breaks_the_group_at_once(receivers: Callable[..., Receivers]) -> None:
    some = receivers(2, 600.0)
    some.receive()
    some.processes[0].kill()
    begun = time.monotonic()
    with pytest.raises(PublishError, match=r"the weight broadcast broke.*rank 1 ended its connection"):
        some.group.send(endless(), some.bucket_bytes)
    assert time.monotonic() - begun < SOON_S


@pytest.mark.distributed
def test_a_stopped_receiver_costs_one_timeout_however_many_messages_are_left(
    receivers: Callable[..., Receivers],
) -> None:
    some = receivers(2, 3.0)
    some.receive()
    some.processes[0].send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(PublishError, match="rank 1 did not copy piece"):
        some.group.send(endless(), some.bucket_bytes)
    # Eight messages are under way at most.
    assert 3.0 <= time.monotonic() - begun < 12.0
