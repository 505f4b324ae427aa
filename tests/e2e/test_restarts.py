"""What dies in a real run is started again, and the run trains what it would have trained without the loss."""

import json
import time
from collections.abc import Callable

import psutil
import pytest

from tests.support.local_run import Run, command_of, gone
from tests.support.same_run import ITERATIONS, SETTINGS, assert_same_run

pytestmark = pytest.mark.distributed

RESTARTS = ("--cluster.restart_delay_s", "0.2")
WAIT_S = 120


def trainer_processes(run: Run) -> list[psutil.Process]:
    """torchrun and the ranks."""
    guards = "async_rl.programs.process_guard"
    return [p for p in run.descendants() if "trainer" in (words := command_of(p)) and guards not in words]


def restarts(run: Run) -> dict[str, int]:
    tasks = json.loads((run.dir / "launch.json").read_text())["tasks"]
    return {task["name"]: task["restarts"] for task in tasks}


def wait_until(run: Run, condition: Callable[[], bool]) -> float:
    """Returns the seconds that it took."""
    begun = time.monotonic()
    while not condition():
        assert run.process is not None and run.process.poll() is None, run.everything_said()
        assert time.monotonic() < begun + WAIT_S, run.everything_said()
        time.sleep(0.05)
    return time.monotonic() - begun


def test_a_trainer_killed_twice_trains_the_same_as_one_that_was_not(new_run: Callable[[str], Run]) -> None:
    """Once a rank alone, once all its processes at once; the instances stay."""
    expected = new_run("uninterrupted")
    expected.start(*SETTINGS)
    assert expected.finish() == 0, expected.everything_said()
    run = new_run("killed")
    run.start(*SETTINGS, *RESTARTS)
    run.wait_for_iterations(2)
    instances = {p.pid for p in run.instances()}
    trainer_processes(run)[-1].kill()
    wait_until(run, lambda: restarts(run)["trainer"] == 1)
    run.wait_for_iterations(5)
    for process in trainer_processes(run):
        process.kill()
    wait_until(run, lambda: restarts(run)["trainer"] == 2)
    assert {p.pid for p in run.instances()} == instances
    assert run.finish() == 0, run.everything_said()
    assert [proof["iteration"] for proof in run.lines("ledger.jsonl")] == list(range(ITERATIONS))
    assert_same_run(run, expected)


def test_a_rank_that_is_killed_while_the_others_wait_is_no_request_to_end(new_run: Callable[[str], Run]) -> None:
    """torchrun then sends SIGTERM to the others, which wait for rollouts and not for a collective."""
    run = new_run("run")
    settings = (*SETTINGS, *RESTARTS, "--train.iterations", "5", "--trainer.num_processes", "2")
    run.start(*settings, "--reward.name", f"python:{run.reward}:slow")
    run.wait_for_iterations(2)
    time.sleep(0.4)  # Into the wait: 24 rewards of 0.15 s, on two cores, make an iteration of about a second.
    ranks = [p for p in trainer_processes(run) if "torch.distributed.run" not in command_of(p)]
    ranks[-1].kill()
    assert run.finish() == 0, run.everything_said()
    assert restarts(run)["trainer"] == 1
    assert [proof["iteration"] for proof in run.lines("ledger.jsonl")] == list(range(5))


def test_an_instance_that_is_killed_comes_back_and_serves_again(new_run: Callable[[str], Run]) -> None:
    run = new_run("run")
    settings = (*SETTINGS, *RESTARTS, "--train.iterations", "200", "--inference.num_instances", "2")
    run.start(*settings, "--reward.name", f"python:{run.reward}:slow")
    run.wait_for_iterations(2)
    run.instances()[0].kill()
    wait_until(run, lambda: run.lines("metrics.jsonl")[-1]["num_instances"] == 1)
    back_s = wait_until(run, lambda: run.lines("metrics.jsonl")[-1]["num_instances"] == 2)
    print(f"the instance served again {back_s:.1f} s after the first iteration without it")
    assert restarts(run) == {"trainer": 0, "instance-0": 1, "instance-1": 0} or restarts(run)["instance-1"] == 1
    proofs = run.lines("ledger.jsonl")
    assert [proof["iteration"] for proof in proofs] == list(range(len(proofs)))
    assert all(proof["on_policy"] and proof["num_responses"] == 24 for proof in proofs)


def test_a_trainer_that_always_dies_ends_the_run_in_bounded_time(new_run: Callable[[str], Run]) -> None:
    run = new_run("run")
    run.reward.write_text(
        "import psutil\n\n\n"
        "def deadly(prompt, responses, row):\n"
        "    parents = psutil.Process().parents()\n"
        "    rank = next(p for p in parents if 'trainer' in p.cmdline())\n"
        "    rank.kill()\n"
    )
    run.start(*SETTINGS, *RESTARTS, "--cluster.max_restarts", "2", "--reward.name", f"python:{run.reward}:deadly")
    run.wait_for_descendants(4)
    family = run.descendants()
    assert run.finish() == 1, run.everything_said()
    said = run.output.read_text()
    assert "RestartsExhausted: trainer was started again 2 times without another iteration" in said, said
    assert "exitcode: -9" in said, "the last cause, from torchrun's report"
    assert gone(family)
    assert not run.lines("ledger.jsonl")


def test_sigterm_to_a_rank_ends_the_run_and_is_no_fault_to_restart(new_run: Callable[[str], Run]) -> None:
    run = new_run("run")
    run.start(*SETTINGS, *RESTARTS, "--train.iterations", "500")
    run.wait_for_iterations(2)
    trainer_processes(run)[-1].terminate()
    assert run.finish(120) == 1
    assert restarts(run)["trainer"] == 0
    assert "RunStopped" in run.output.read_text()
