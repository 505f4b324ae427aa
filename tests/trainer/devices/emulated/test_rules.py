"""The rules of the emulated NPU, each with what a program that breaks it gets."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from async_rl.shared.weights.ipc import PIECE_BYTES, HandOver
from async_rl.shared.weights.store import StoreServer
from tests.support.devices.emulated import build
from tests.support.devices.emulated.process import on_emulated_npu

# The first one on a machine waits for the compiler.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


def stand_in() -> Any:
    import torch_npu

    return torch_npu


@contextmanager
def on(stream: torch.Stream) -> Iterator[None]:
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    yield
    torch.accelerator.set_stream(before)


def pinned(*values: float) -> torch.Tensor:
    return torch.tensor(values).pin_memory()


def is_poison(tensor: torch.Tensor) -> bool:
    return bool(tensor.isnan().all())


@on_emulated_npu
def test_torch_loads_it_as_the_device_npu() -> None:
    assert torch.zeros(1, device="npu").device == torch.device("npu", 0)
    assert torch.npu.device_count() == 8 and stand_in().npu is torch.npu  # type: ignore[attr-defined]
    torch.npu.set_device(3)  # type: ignore[attr-defined]
    assert torch.zeros(1, device="npu").device.index == 3
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(1, device="npu:8")


@on_emulated_npu
def test_tensors_on_two_devices_are_refused() -> None:
    here, other = torch.ones(2, 2, device="npu"), torch.ones(2, 2)
    for one in (other, other.to("npu:1")):
        with pytest.raises(RuntimeError, match=r"on the same device.*npu:0"):
            here @ one
        with pytest.raises(RuntimeError, match="npu:0"):
            torch.cat([here, one])
    assert (here + torch.tensor(2.0)).sum().item() == 12


@on_emulated_npu
def test_it_computes_what_the_cpu_computes_with_gradients() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 7), torch.randn(3, 7)
    results = []
    for device in ("cpu", "npu"):
        leaf, w = x.to(device, copy=True).requires_grad_(), weight.to(device)
        out = torch.nn.functional.linear(leaf, w).softmax(-1).log().view(-1)[::2].square().sum()
        out.backward()
        assert leaf.grad is not None
        results.append(
            (out.cpu(), leaf.grad.cpu(), leaf.detach().sort(dim=1).indices.cpu(), leaf.detach().bfloat16().cpu())
        )
    assert all(map(torch.equal, *results))


@on_emulated_npu
def test_what_a_host_waits_for_is_counted_by_kind() -> None:
    values, waits = torch.arange(4.0, device="npu"), stand_in().waits
    waits.clear()
    _ = values + 1, values.view(2, 2), values.to("npu"), torch.zeros(3, device="npu")
    assert not waits
    _ = values.tolist(), bool((values > 1).any()), values[values > 1], values.nonzero(), values.unique()
    torch.npu.synchronize()  # type: ignore[attr-defined]
    torch.accelerator.current_stream().synchronize()
    assert waits == {
        **{"copy to host": 1, "item": 1, "aten::nonzero": 2, "aten::_unique2": 1},
        **{"synchronize device": 1, "synchronize stream": 1},
    }


@on_emulated_npu
def test_only_copies_of_pinned_memory_do_not_block() -> None:
    waits, there = stand_in().waits, torch.zeros(2, device="npu")
    waits.clear()
    pinned(1, 2).to("npu", non_blocking=True)
    there.to(torch.empty(2).pin_memory().device, non_blocking=False)
    torch.empty(2).pin_memory().copy_(there, non_blocking=True)
    assert waits == {"copy to host": 1}
    torch.tensor([1.0]).to("npu", non_blocking=True)
    torch.tensor([1.0], device="npu")
    torch.empty(2).copy_(there, non_blocking=True)
    assert waits == {"copy to host": 2, "blocking copy to device": 2}


@on_emulated_npu
def test_a_copy_to_the_host_is_late_until_somebody_waits() -> None:
    there, event = torch.ones(2, device="npu"), torch.Event("npu")
    for wait in (event.synchronize, torch.accelerator.synchronize, torch.accelerator.current_stream().synchronize):
        on_host = torch.zeros(2).pin_memory()
        on_host.copy_(there, non_blocking=True)
        event.record()
        assert is_poison(on_host) and not event.query()
        wait()
        assert on_host.tolist() == [1, 1] and event.query()


@on_emulated_npu
def test_an_event_that_is_asked_again_and_again_ends() -> None:
    on_host, event = torch.zeros(2).pin_memory(), torch.Event("npu")
    on_host.copy_(torch.ones(2, device="npu"), non_blocking=True)
    event.record()
    assert [event.query() for _ in range(5)] == [False, False, False, True, True]
    assert on_host.tolist() == [1, 1]


@on_emulated_npu
def test_a_source_that_is_overwritten_before_its_copy_gives_the_new_values() -> None:
    source = pinned(1, 2)
    there = source.to("npu", non_blocking=True)
    source.fill_(5)
    assert there.tolist() == [5, 5]
    # What is freed is kept.
    there = pinned(3, 4).to("npu", non_blocking=True)
    assert (there + 1).tolist() == [4, 5]


@on_emulated_npu
def test_a_kernel_that_does_not_wait_for_another_streams_copy_reads_poison() -> None:
    side, source = torch.Stream("npu"), pinned(1, 2)
    there = torch.empty(2, device="npu")
    with on(side):
        there.copy_(source, non_blocking=True)
    assert is_poison(there * 2)
    torch.accelerator.current_stream().wait_stream(side)
    assert (there * 2).tolist() == [2, 4]


@on_emulated_npu
def test_a_kernel_that_does_not_wait_for_another_streams_kernel_gives_poison() -> None:
    side, there = torch.Stream("npu"), torch.ones(2, device="npu")
    with on(side):
        assert is_poison(there + 1)
        side.wait_stream(stand_in().npu.default_stream())
        assert (there + 1).tolist() == [2, 2]
    assert stand_in().waits["race in aten::add"] == 1


@on_emulated_npu
def test_a_copy_between_tensors_of_the_device_is_late_on_a_side_stream() -> None:
    side, source = torch.Stream("npu"), torch.ones(2, device="npu")
    there = torch.empty_like(source)
    side.wait_stream(torch.accelerator.current_stream())
    with on(side):
        there.copy_(source)
    source.fill_(7)  # Nothing waits for the copy.
    torch.accelerator.current_stream().wait_stream(side)
    assert there.tolist() == [7, 7]


@on_emulated_npu
def test_which_copies_are_late_follows_from_the_seed() -> None:
    def late(seed: str) -> list[bool]:
        stand_in().configure(seed)
        there, found = torch.zeros(1, device="npu"), []
        for _ in range(64):
            on_host = torch.zeros(1).pin_memory()
            on_host.copy_(there, non_blocking=True)
            found.append(is_poison(on_host))
        return found

    assert late("1") == late("1") != late("2")
    assert 40 < sum(late("1")) < 64 and not any(late("never")) and all(late("always"))


@on_emulated_npu
def test_a_device_has_a_capacity() -> None:
    npu = stand_in().npu
    stand_in().configure(capacity=1 << 20)
    first = torch.zeros(1 << 19, dtype=torch.uint8, device="npu")
    assert (npu.memory_allocated(), npu.mem_get_info()) == (1 << 19, (1 << 19, 1 << 20))
    with pytest.raises(torch.OutOfMemoryError, match=r"NPU out of memory\. Tried to allocate 1048576 bytes \(NPU 0"):
        torch.zeros(1 << 20, dtype=torch.uint8, device="npu")
    torch.zeros(1 << 20, dtype=torch.uint8, device="npu:1")
    del first
    assert (npu.memory_allocated(), npu.max_memory_allocated(), npu.memory_reserved()) == (0, 1 << 19, 1 << 19)
    npu.reset_peak_memory_stats()
    npu.empty_cache()
    assert npu.max_memory_allocated() == npu.memory_reserved() == 0


@on_emulated_npu
def test_what_an_npu_lacks_is_refused_by_name() -> None:
    double = torch.ones(2, 2, dtype=torch.float64, device="npu")
    with pytest.raises(RuntimeError, match="aten::mm is not implemented for DT_DOUBLE"):
        double @ double
    single, scale = torch.ones(16, 16, device="npu"), torch.ones((), device="npu")
    eighth = single.to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="aten::_scaled_mm is not implemented for NPU"):
        torch._scaled_mm(eighth, eighth.T, scale, scale)
    with pytest.raises(RuntimeError, match="npu operator: dtype"):
        query = torch.ones(2, 1, 8, dtype=torch.float64, device="npu")
        stand_in().npu_fusion_attention(query, query, query, 1, "TND", actual_seq_qlen=[2], actual_seq_kvlen=[2])


@on_emulated_npu
def test_fused_operators_take_tensors_of_the_device_and_have_gradients() -> None:
    x, weight = torch.randn(3, 4, device="npu", requires_grad=True), torch.ones(4, device="npu")
    y = stand_in().npu_rms_norm(x, weight, 1e-6)[0]
    y.square().sum().backward()
    assert y.device.type == "npu" and x.grad is not None and x.grad.device.type == "npu"
    with pytest.raises(RuntimeError, match="npu_rms_norm: expected all tensors on npu"):
        stand_in().npu_rms_norm(x, torch.ones(4), 1e-6)


@on_emulated_npu
def test_a_lost_device_refuses_all_further_work() -> None:
    stand_in().configure(faults="lost:3")
    x = torch.empty(2, device="npu").fill_(1).add_(1)
    for work in (lambda: x + 1, x.tolist, torch.accelerator.synchronize, lambda: torch.empty(1, device="npu")):
        with pytest.raises(RuntimeError, match="device lost"):
            work()


@on_emulated_npu
def test_an_allocation_fails_on_demand() -> None:
    stand_in().configure(faults="oom:2")
    torch.empty(1, device="npu")
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 512 bytes"):
        torch.empty(1, device="npu")
    torch.empty(1, device="npu")


def group(timeout_s: float = 30) -> Any:
    """Of this process alone, as the trainer makes it for weights."""
    options = stand_in().ProcessGroupHCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return stand_in().ProcessGroupHCCL(dist.HashStore(), 0, 1, options)


@on_emulated_npu
def test_hccl_takes_tensors_of_the_device_only() -> None:
    dist.init_process_group("cpu:gloo,npu:hccl", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(on_host := torch.ones(2))
    dist.all_reduce(there := torch.ones(2, device="npu"))
    assert on_host.tolist() == there.tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        group().broadcast([on_host], dist.BroadcastOptions())
    with pytest.raises(RuntimeError, match="must be contiguous"):
        group().broadcast([torch.ones(2, 2, device="npu").T], dist.BroadcastOptions())


@on_emulated_npu
def test_a_collectives_result_is_there_for_a_stream_that_waits() -> None:
    members, there = group(), torch.ones(2, device="npu")
    stand_in().waits.clear()
    work = members.broadcast([there], dist.BroadcastOptions())
    assert is_poison(there + 1)
    work.wait()
    assert (there + 1).tolist() == [2, 2]
    assert stand_in().waits == {"item": 1, "race in aten::add": 1, "copy to host": 1}


@on_emulated_npu
def test_a_broken_link_is_the_error_of_its_work_and_of_all_that_follows() -> None:
    stand_in().configure(faults="link:2")
    members, there = group(), torch.ones(2, device="npu")
    members.broadcast([there], dist.BroadcastOptions()).wait()
    for _ in range(2):
        work = members.broadcast([there], dist.BroadcastOptions())
        assert work.is_completed() and "link error" in str(work.exception())
        work.wait()
        with pytest.raises(RuntimeError, match="link error"):
            there.tolist()


def pair(timeout_s: float) -> dict[int, Any]:
    """A group of two members, both in this process."""
    store, made = dist.HashStore(), {}

    def join(rank: int) -> None:
        options = stand_in().ProcessGroupHCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        made[rank] = stand_in().ProcessGroupHCCL(store, rank, 2, options)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return made


@on_emulated_npu
def test_wait_returns_at_once_and_an_abort_ends_what_waits_for_a_dead_peer() -> None:
    made, there = pair(30), torch.ones(2, device="npu")
    work = made[1].broadcast([there], dist.BroadcastOptions())
    work.wait()
    assert not work.is_completed()
    made[1].abort_hccl_comm("the peer sends nothing")
    assert work.is_completed() and "aborted" in str(work.exception())
    with pytest.raises(RuntimeError, match="aborted"):
        there.tolist()
    with pytest.raises(RuntimeError, match="aborted"):
        made[1].broadcast([there], dist.BroadcastOptions())


@on_emulated_npu
def test_a_peer_that_sends_nothing_is_the_error_of_who_needs_its_data_when_the_groups_time_is_over() -> None:
    made, there = pair(1), torch.ones(2, device="npu")
    made[1].broadcast([there], dist.BroadcastOptions()).wait()
    with pytest.raises(RuntimeError, match=r"(?i)timed?[ -]?out"):
        there.tolist()


@on_emulated_npu
def test_several_threads_may_wait_for_what_a_peer_sends() -> None:
    made, there = pair(20), torch.zeros(2, device="npu")
    made[1].recv([there], 0, 0).wait()
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(torch.accelerator.synchronize) for _ in range(4)]
        time.sleep(0.5)
        made[0].send([torch.ones(2, device="npu:1")], 1, 0).wait()
        torch.accelerator.synchronize(1)
        [each.result(timeout=10) for each in waiting]
    assert there.tolist() == [1, 1]


@on_emulated_npu
def test_memory_that_is_shared_is_one_memory_in_all_that_map_it() -> None:
    data = torch.arange(1 << 20, dtype=torch.int32).to("npu:2").view(torch.uint8)
    storage: Any = torch.UntypedStorage
    _, *fields = storage._share_npu_(data.untyped_storage())
    mapped = storage._new_shared_npu(2, *fields)
    other = torch.empty(0, dtype=torch.uint8, device="npu:2").set_(mapped, 0, (len(data),), (1,))
    assert torch.equal(other.cpu(), data.cpu()) and data[5 * 4].item() == 5
    data.fill_(7)
    assert int(other.min()) == 7 and other.data_ptr() != data.data_ptr()
    with pytest.raises(RuntimeError, match="only whole large storages"):
        storage._share_npu_(torch.zeros(8, device="npu").untyped_storage())


@on_emulated_npu
def test_weights_pass_between_two_devices_or_on_one_and_all_copies_are_waited_for() -> None:
    for index in (0, 1):
        sent = torch.randint(0, 256, (PIECE_BYTES + 3,), dtype=torch.uint8)
        store = StoreServer("127.0.0.1", ["s" * 32]).store(60.0)
        with ThreadPoolExecutor(1) as threads:
            sender = threads.submit(HandOver, store, 0, 2, 60.0, torch.device("npu", 0))
            receiver = HandOver(store, 1, 2, 60.0, torch.device("npu", index))
            sending = threads.submit(sender.result().broadcast, sent.to("npu:0"))
            received = torch.zeros_like(sent, device=receiver.device)
            receiver.broadcast(received)
            sender.result().wait(sending.result())
        assert torch.equal(received.cpu(), sent)


def test_it_is_compiled_once_for_each_source_and_set_of_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Path] = []

    def compile_to(made: Path) -> None:
        compiled.append(made)
        made.touch()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_compile", compile_to)
    first, again = build.library.__wrapped__(), build.library.__wrapped__()
    assert first == again and first.exists() and len(compiled) == 1
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    assert build.library.__wrapped__() != first and len(compiled) == 2
