"""Work of a device that never ends: the rule on a clock of its own, and a kernel that hangs on the emulated NPU."""

import gc
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from async_rl.errors import RankLost
from tests.support.clock import Clock
from tests.support.devices.emulated.build import lacking
from tests.support.devices.emulated.environment import emulated_environment
from tests.support.devices.emulated.process import on_emulated_npu
from tests.support.waiting import wait_for
from trainer.device_watch import LOOKS_PER_LIMIT, LOST_LIMITS, DeviceWatch
from trainer.process_end import MAY_PASS

# The first one on a machine waits for the compiler.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

LIMIT_S = 60.0


def watch_of(clock: Clock, num_ranks: int = 1) -> DeviceWatch:
    return DeviceWatch(torch.device("npu", 0), num_ranks, LIMIT_S / LOST_LIMITS, lambda error: None, clock)


def looks(watch: DeviceWatch, clock: Clock, duration_s: float) -> list[RankLost]:
    """What the watch finds while that time passes."""
    found = []
    for _ in range(round(duration_s / LIMIT_S * LOOKS_PER_LIMIT)):
        clock.sleep(LIMIT_S / LOOKS_PER_LIMIT)
        found += [error for error in [watch.look()] if error is not None]
    return found


@pytest.mark.nightly
@on_emulated_npu
def test_work_that_lasts_too_long_is_named_with_its_device_and_limit() -> None:
    watch = watch_of(clock := Clock())
    watch.look()
    with watch.during("window 3 of iteration 7"):
        assert not looks(watch, clock, LIMIT_S)
        first, *_ = looks(watch, clock, LIMIT_S / 2)
    assert str(first).startswith(
        "window 3 of iteration 7 has not finished on npu:0 for 60 s (30 times trainer.lost_after_s): a kernel hangs"
    )


@pytest.mark.nightly
@on_emulated_npu
def test_each_part_and_each_work_has_the_whole_time_and_the_time_between_does_not_count() -> None:
    watch = watch_of(clock := Clock())
    for _ in range(2):
        with watch.during("a window"):
            for _ in watch.each(range(3)):
                assert not looks(watch, clock, LIMIT_S * 0.9)
        assert not looks(watch, clock, LIMIT_S * 5)


@pytest.mark.nightly
@on_emulated_npu
def test_how_long_a_receiver_keeps_a_tensor_does_not_count_and_how_long_it_takes_to_make_does() -> None:
    watch, found = watch_of(clock := Clock()), []

    def tensors() -> Iterator[int]:
        yield 1
        found.extend(looks(watch, clock, LIMIT_S * 1.5))
        yield 2

    for part in watch.making("reading a tensor", tensors()):
        assert not looks(watch, clock, LIMIT_S * 5), part
    assert str(found[0]).startswith("reading a tensor has not finished on npu:0 for 60 s")
    assert not looks(watch, clock, LIMIT_S * 5)


@pytest.mark.nightly
@on_emulated_npu
def test_work_that_failed_is_over() -> None:
    watch = watch_of(clock := Clock())
    with pytest.raises(ZeroDivisionError), watch.during("a window"):
        _ = 1 / 0
    assert not looks(watch, clock, LIMIT_S * 2)


@pytest.mark.nightly
@on_emulated_npu
def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    watch = watch_of(clock := Clock())
    with watch.during("a window"):
        assert not looks(watch, clock, LIMIT_S / 2)
        clock.sleep(100 * LIMIT_S)
        assert watch.look() is None
        assert looks(watch, clock, LIMIT_S / 2)


@pytest.mark.nightly
@on_emulated_npu
def test_a_kernel_that_hangs_is_noticed_also_behind_the_work_and_the_host_waits_no_more_often() -> None:
    import torch_npu

    there = torch.ones(2, device="npu")
    watch = watch_of(clock := Clock())
    torch_npu.waits.clear()
    with watch.during("a step that ends"):
        there.add_(1)
    assert not looks(watch, clock, LIMIT_S * 3)
    torch_npu.configure(faults="hang:1")
    with watch.during("the step of iteration 7"):
        there.add_(1)
    assert "the step of iteration 7 has not finished on npu:0" in str(looks(watch, clock, LIMIT_S * 2)[0])
    assert not torch_npu.waits
    for wait in (there.tolist, there.sum().item, torch.accelerator.synchronize, lambda: there.nonzero()):
        waits = threading.Thread(target=wait, daemon=True)
        waits.start()
        waits.join(0.3)
        assert waits.is_alive(), "whoever waits for the device waits for ever"


@pytest.mark.nightly
@on_emulated_npu
def test_its_thread_ends_the_process_and_ends_with_the_watch() -> None:
    import torch_npu

    def num_threads() -> int:
        return sum(thread.name == "async-rl-device-watch" for thread in threading.enumerate())

    found: list[RankLost] = []
    watch = DeviceWatch(torch.device("npu", 0), 1, 0.3 / LOST_LIMITS, found.append)
    assert num_threads() == 1
    torch_npu.configure(faults="hang:2")
    with watch.during("a window"):
        there = torch.ones(2, device="npu").add_(1)
        threading.Thread(target=there.tolist, daemon=True).start()
        wait_for(lambda: bool(found))
    other = DeviceWatch(torch.device("npu", 0), 1, 0.3 / LOST_LIMITS)
    del watch, other
    gc.collect()
    wait_for(lambda: num_threads() == 0)


def test_a_cpu_and_one_of_several_ranks_are_not_watched() -> None:
    for device, num_ranks in ((torch.device("cpu"), 1), (torch.device("cuda", 0), 2)):
        watch = DeviceWatch(device, num_ranks, LIMIT_S / LOST_LIMITS, clock=(clock := Clock()))
        with watch.during("a window"):
            assert list(watch.each([1, 2])) == [1, 2]
            assert not looks(watch, clock, LIMIT_S * 2)
    assert not any(thread.name == "async-rl-device-watch" for thread in threading.enumerate())


@pytest.mark.nightly
def test_a_rank_whose_kernel_hangs_names_its_window_shows_its_stacks_and_is_to_be_started_again(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    if (reason := lacking()) is not None:
        pytest.skip(reason)
    report = tmp_path / "error.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.devices.emulated.hung_worker", str(tiny_model("qwen3", tied=True))],
        env=emulated_environment(tmp_path) | {"TORCHELASTIC_ERROR_FILE": str(report)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == MAY_PASS and done.stdout == "a window is trained\n", done.stderr
    named = "RankLost: training of window 2 of iteration 0 has not finished on npu:0 for 3 s"
    assert json.loads(report.read_text())["message"]["message"].startswith(named)
    assert "trainer/rank.py" in done.stderr and "in accumulate" in done.stderr, done.stderr


def test_work_whose_end_cannot_be_noted_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that is lost."""

    def lost(_: torch.device) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(torch, "Event", lost)
    clock = Clock()
    watch = DeviceWatch(torch.device("cuda", 0), 1, LIMIT_S / LOST_LIMITS, lambda error: None, clock)
    with pytest.raises(RuntimeError), watch.during("a window"):
        pass
    assert not looks(watch, clock, LIMIT_S * 2)
