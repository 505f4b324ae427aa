"""A run that ends before it is done saves its last whole iteration, and goes on from there bit for bit."""

import signal
from collections.abc import Callable

import psutil
import pytest

from tests.support.local_run import Run, command_of, gone
from tests.support.same_run import SETTINGS, assert_same_run
from trainer.checkpoint.files import find_damage, read_manifest

pytestmark = pytest.mark.distributed

NEVER = ("--checkpoint.every", "1000")
"""Only the end of the run saves."""

START_S = 240
"""Two training ranks on a machine that has more to do."""

END_S = 120
"""`checkpoint.grace_s`: the end comes by itself, and long before that."""

FAILING_REWARD = '''
import asyncio, os, pathlib, sys

HERE = pathlib.Path(__file__)


async def score(prompt, responses, row):
    """Calls past the mark do what the file beside this one says, as long as it is there."""
    fault = HERE.with_name("fault")
    if fault.exists():
        what = fault.read_text()
        if what == "raises": raise KeyError("no such column")
        if what == "exits": sys.exit(3)
        if what == "kills": os._exit(3)
        if what == "cancels": raise asyncio.CancelledError
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass
    return [sum(c in "aeiou" for c in r.text) / max(len(r.text), 1) for r in responses]
'''


def training_ranks(run: Run) -> list[psutil.Process]:
    return [
        p for p in run.descendants() if "trainer" in (words := command_of(p)) and "torch.distributed.run" not in words
    ]


def test_sigterm_saves_the_last_whole_iteration_and_the_run_goes_on_as_if_nothing_had_been(
    new_run: Callable[[str], Run],
) -> None:
    """To one training rank alone: the others learn of it."""
    settings = (*NEVER, "--train.iterations", "5", "--trainer.num_processes", "2")
    expected = new_run("uninterrupted")
    expected.start(*SETTINGS, *settings)
    assert expected.finish(START_S) == 0, expected.everything_said()
    run = new_run("told")
    run.start(*SETTINGS, *settings)
    run.wait_for_iterations(1, START_S)
    processes = run.descendants()
    training_ranks(run)[-1].send_signal(signal.SIGTERM)
    assert run.finish(END_S) != 0
    assert gone(processes)
    (checkpoint,) = (run.dir / "checkpoints").iterdir()
    num_trained = len(run.lines("metrics.jsonl"))
    assert checkpoint.name == f"iteration-{num_trained:06}" and 1 <= num_trained < 5, run.everything_said()
    run.start(*SETTINGS, *settings, "--run.resume", "true")
    assert run.finish(START_S) == 0, run.everything_said()
    assert_same_run(run, expected)


def test_ctrl_c_at_the_launcher_waits_for_the_checkpoint(new_run: Callable[[str], Run]) -> None:
    run = new_run("run")
    run.start(*SETTINGS, *NEVER, "--train.iterations", "500", "--trainer.tensor_parallel", "2")
    run.wait_for_iterations(2, START_S)
    assert run.process is not None
    run.process.send_signal(signal.SIGINT)
    assert run.finish(END_S) != 0
    (checkpoint,) = (run.dir / "checkpoints").iterdir()
    assert checkpoint.name == f"iteration-{len(run.lines('metrics.jsonl')):06}", run.everything_said()


@pytest.mark.parametrize(
    ("fault", "ranks", "message", "goes_on"),
    [
        ("swallows", "1", "no answer within reward.timeout_s = 2 s", False),
        ("exits", "2", "SystemExit: 3", True),
        ("cancels", "1", "CancelledError", False),
    ],
)
def test_a_reward_that_fails_in_the_worst_ways_ends_the_run_in_time_with_its_last_sound_step(
    new_run: Callable[[str], Run], fault: str, ranks: str, message: str, goes_on: bool
) -> None:
    """One of them goes on from its checkpoint; of the others it is read and found whole."""
    run = new_run("run")
    run.reward.write_text(FAILING_REWARD)
    settings = (
        *(*NEVER, "--reward.name", f"python:{run.reward}:score", "--reward.timeout_s", "2"),
        *("--trainer.num_processes", ranks, "--train.iterations"),
    )
    run.start(*SETTINGS, *settings, "500")
    run.wait_for_iterations(2, START_S)
    (run.reward.parent / "fault").write_text(fault)
    processes = run.descendants()
    assert run.finish(END_S) != 0
    assert gone(processes)
    said = run.everything_said()
    assert "RewardError" in said and message in said, said
    num_trained = len(run.lines("metrics.jsonl"))
    (checkpoint,) = (run.dir / "checkpoints").iterdir()
    assert checkpoint.name == f"iteration-{num_trained:06}", said
    assert find_damage(checkpoint, read_manifest(checkpoint)["files"]) is None
    if not goes_on:
        return
    (run.reward.parent / "fault").unlink()
    run.start(*SETTINGS, *settings, str(num_trained + 1), "--run.resume", "true")
    assert run.finish(START_S) == 0, run.everything_said()
    assert [proof["iteration"] for proof in run.lines("ledger.jsonl")] == list(range(num_trained + 1))
