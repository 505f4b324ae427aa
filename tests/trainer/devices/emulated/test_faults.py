"""Faults of a device in whole runs: each ends in an error that names it, or the run goes on; nothing hangs."""

from collections.abc import Callable

import pytest

from tests.trainer.devices.emulated.conftest import EmulatedRun

pytestmark = [pytest.mark.distributed, pytest.mark.devices, pytest.mark.timeout(900)]

ON_NPU = ("--trainer.device=npu", "--checkpoint.every=1")
MESSAGES = {"oom": "NPU out of memory. Tried to allocate", "lost": "device lost", "link": "link error"}


@pytest.mark.parametrize("fault", ["oom:300", pytest.param("lost:7000", marks=pytest.mark.nightly), "link:4"])
def test_a_fault_is_named_and_the_run_goes_on(emulated_run: Callable[..., EmulatedRun], fault: str) -> None:
    """At the start of training, in the third iteration, and in the first publish."""
    kind = fault.partition(":")[0]
    faulty = emulated_run(kind, faults=f"{fault}@async_rl.trainer")
    run = faulty.run
    run.start(*ON_NPU)
    assert run.finish() == 0, run.everything_said()
    assert (faulty.folder / "records" / f"struck.{kind}").exists(), "the fault did not strike"
    assert MESSAGES[kind] in run.everything_said()
    assert run.restarts()["trainer"] == (kind != "link")
    records = run.lines("metrics.jsonl")
    assert [record["iteration"] for record in records] == [0, 1, 2] and all(record["on_policy"] for record in records)


@pytest.mark.nightly  # Too long for `make test-devices`.
def test_an_instance_without_memory_is_named_and_started_again_and_the_run_goes_on(
    emulated_run: Callable[..., EmulatedRun],
) -> None:
    """While it generates, or takes weights."""
    faulty = emulated_run("instance", faults="oom:4000@inference_service")
    run = faulty.run
    run.start(*ON_NPU, "--inference.num_instances=2")
    assert run.finish() == 0, run.everything_said()
    assert (faulty.folder / "records" / "struck.oom").exists(), "the fault did not strike"
    assert MESSAGES["oom"] in run.everything_said()
    assert run.restarts()["trainer"] == 0 and sum(run.restarts().values()) == 1, run.restarts()
    records = run.lines("metrics.jsonl")
    assert [record["iteration"] for record in records] == [0, 1, 2] and all(record["on_policy"] for record in records)


@pytest.mark.nightly  # Too long for `make test-devices`, which has the same fault with a restart.
def test_a_device_lost_without_a_restart_ends_the_run_which_resumes(emulated_run: Callable[..., EmulatedRun]) -> None:
    run = emulated_run("ended", faults="lost:7000@async_rl.trainer").run
    run.start(*ON_NPU, "--cluster.max_restarts=0")
    assert run.finish() != 0 and "device lost" in run.output.read_text()
    assert 1 <= run.num_trained() < 3
    run.start(*ON_NPU, "--run.resume=true")
    assert run.finish() == 0 and run.num_trained() == 3, run.everything_said()


def test_a_device_lost_in_the_canary_of_one_rank_ends_both(emulated_run: Callable[..., EmulatedRun]) -> None:
    run = emulated_run("canary", faults="lost:2500@async_rl.trainer").run
    layout = ("--trainer.num_processes=2", "--trainer.tensor_parallel=2")
    run.start(*ON_NPU, *layout, "--cluster.max_restarts=0")
    # The other rank is in a collective of the same score meanwhile.
    assert run.finish(120) != 0 and "device lost" in run.everything_said()
