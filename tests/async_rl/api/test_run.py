"""Runs from Python, of stand-ins for the instances and the trainer; the guards and the launcher are real."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

import async_rl
from async_rl.errors import ConfigError, ProcessFailed, RewardError, RunDirInUse, RunStopped
from tests.async_rl.api.conftest import ROWS
from tests.support.local_run import command_of
from tests.support.stand_ins import Ground
from tests.support.tiers import by_day
from tests.support.waiting import wait_for

pytestmark = pytest.mark.distributed

pytest.importorskip("cloudpickle")

ALL = 4
"""An instance, the trainer, and a worker of each."""

FOR_EVER = "time.sleep(300)"

Train = Callable[..., Any]


def test_a_run_gives_its_records_as_they_arrive_and_ends_with_its_trainer(
    ground: Ground, train: Train, capfd: pytest.CaptureFixture[str]
) -> None:
    ground.then_trainer_does("while not os.path.exists('go'):\n    time.sleep(0.05)")
    run = train(quiet=False)
    records = []
    for record in run:
        assert run.state == "running"
        records.append(record)
        if len(records) == 3:
            (ground.path / "go").touch()
    assert [record["iteration"] for record in records] == [0, 1, 2]
    assert (run.wait().state, run.error) == ("finished", None)
    assert repr(run).endswith("/run': finished, 3 of 3 iterations>")
    said = capfd.readouterr().out
    assert all(f"iteration {number}, {number + 1}/3 done" in said for number in range(3)), "a line for each"
    assert "the run is trained" in said
    assert ground.living() == {}
    opened = async_rl.open_run(ground.path / "run")
    assert opened.state == "finished" and [record["iteration"] for record in opened] == [0, 1, 2]
    assert list(opened.metrics["reward_mean"]) == [0.5] * 3, "a table of pandas, which is installed here"
    assert opened.config.train.iterations == 3
    with pytest.raises(ConfigError, match="holds the records of another run"):
        train()


def test_a_named_error_of_the_trainer_is_raised_where_the_run_is_waited_for(ground: Ground, train: Train) -> None:
    ground.then_trainer_does(
        "from async_rl.errors import RewardError\n"
        "from async_rl.shared.programs.failure_report import report_failure\n"
        "error = RewardError('reward x failed:\\n  File \"mine.py\", line 3, in mine')\n"
        "report_failure(error, os.environ)\nraise error"
    )
    run = train()
    with pytest.raises(RewardError, match=r'reward x failed:\n  File "mine.py", line 3') as raised:
        run.wait()
    assert "trainer.log" in str(raised.value), "and where the rest is"
    with pytest.raises(RewardError):
        list(run)
    assert run.state == "failed"


def test_what_the_command_refuses_is_raised_and_nothing_was_started(ground: Ground, train: Train) -> None:
    with pytest.raises(ConfigError, match=r"prompts.columns") as raised:
        train(data=[{"question": "What is 1 + 1?", "answer": "2"}]).wait()
    assert "no value in column 'prompt'" in str(raised.value) and ground.pids() == {}
    assert train().wait().state == "finished", "the folder has no run yet"


def test_one_folder_has_one_run_and_stop_ends_it_once_and_again(ground: Ground, train: Train) -> None:
    ground.then_trainer_does(FOR_EVER)
    run = train()
    with pytest.raises(RunDirInUse):
        train()
    records = ground.path / "run" / "metrics.jsonl"
    wait_for(lambda: records.exists() and records.read_text().count("\n") == 3, said=ground.pids)
    thread = threading.Thread(target=run.stop)
    thread.start()
    run.stop()
    thread.join()
    assert ground.living() == {}
    run.stop()
    assert (run.wait().state, run.error) == ("finished", None), "three of three iterations"
    other = train(out="other", data="rows.jsonl")
    with pytest.raises(RunDirInUse):
        other.resume()
    other.stop()
    assert other.state == "stopped" and other.wait(), "by its own wish, and so without an error"


@pytest.mark.parametrize("victim", ["guard", "launcher"])
def test_a_run_whose_process_is_killed_says_so_and_leaves_nothing(ground: Ground, train: Train, victim: str) -> None:
    ground.then_trainer_does(FOR_EVER)
    run = train()
    ground.wait_for_processes(ALL)
    (psutil.Process(run._command.pid) if victim == "guard" else launcher_of(run)).kill()
    with pytest.raises(ProcessFailed, match="signal 9"):
        run.wait()
    assert ground.living() == {}


def test_a_run_that_something_else_ends_is_one_that_was_stopped(ground: Ground, train: Train) -> None:
    ground.then_trainer_does(FOR_EVER)
    run = train()
    ground.wait_for_processes(ALL)
    launcher_of(run).terminate()
    with pytest.raises(RunStopped, match="SIGTERM"):
        list(run)
    assert ground.living() == {}


def test_a_run_in_a_loop_and_in_a_thread(ground: Ground, train: Train) -> None:
    async def follow() -> list[int]:
        run = train()
        await asyncio.to_thread(run.wait)
        return [record["iteration"] for record in run]

    assert asyncio.run(follow()) == [0, 1, 2]
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(r["iteration"] for r in train(out="run2")))
    (ground.path / "trainer.py").write_text(
        (ground.path / "trainer.py").read_text().replace("run/metrics", "run2/metrics")
    )
    thread.start()
    thread.join(120)
    assert found == [0, 1, 2]
    assert ground.living() == {}


def test_resume_goes_on_with_the_files_of_the_folder(ground: Ground, train: Train) -> None:
    def reward(prompt: Any, responses: Any, row: Any) -> list[float]:
        return [1.0] * len(responses)

    run = train(reward).wait()
    before = (ground.path / "run" / "inputs" / "reward.py").read_text()
    opened = async_rl.open_run("run")
    assert opened.resume(quiet=True, train={"iterations": 6}) is opened
    opened.wait()
    log = (ground.path / "run" / "logs" / "trainer.log").read_text()
    assert "--run.resume=true" in log.splitlines()[-1]
    assert run.config.train.iterations == 6 and run.config.prompts.prompts_per_batch == 1
    assert (ground.path / "run" / "inputs" / "reward.py").read_text() == before
    (ground.path / "run" / "inputs" / "run.toml").unlink()
    with pytest.raises(ConfigError, match=r"async-rl run CONFIG --run\.resume=true"):
        opened.resume()


SCRIPT = f"""
import async_rl, sys, time
kept = 0.25
run = async_rl.train("model", {ROWS!r}, lambda prompt, responses, row: [kept for _ in responses], "run",
    prompts={{"prompts_per_batch": 1, "max_prompt_tokens": 100, "chat_template": False}},
    rollout={{"max_response_tokens": 28}}, train={{"iterations": 3}}, checkpoint={{"grace_s": 5}},
    cluster={{"max_restarts": 0}})
"""
"""Without a guard for `__main__`."""

ENDS = {
    "at its end": ("", 0),
    "at its end, of a run that fails": ("import atexit\natexit.register(print, 'other handlers run', end='')", 120),
    "by an error": ("raise KeyError('mine')", 1),
    "by Ctrl-C": ("for record in run: time.sleep(0.01)\nrun.wait()", -signal.SIGINT),
    "by kill -9": ("run.wait()", -signal.SIGKILL),
    "by stop, beside a fork": (
        "import os\npid = os.fork()\nif not pid: time.sleep(300)\nrun.stop()\nos.kill(pid, 9)",
        0,
    ),
}


@pytest.mark.parametrize("how", by_day(ENDS, ["by kill -9"]))
def test_a_script_leaves_nothing_however_it_ends(ground: Ground, how: str) -> None:
    lines, code = ENDS[how]
    if how == "at its end, of a run that fails":
        ground.then_trainer_does("sys.exit(7)")
    elif how != "at its end":
        ground.then_trainer_does(FOR_EVER)
    if how == "by an error":
        lines = "while not __import__('os').path.exists('run/metrics.jsonl'): time.sleep(0.1)\n" + lines
    script = start_script(SCRIPT + lines)
    if how in ("by Ctrl-C", "by kill -9"):
        # Its processes are started cold.
        wait_for(lambda: len(ground.pids()) >= ALL, timeout_s=240)
        script.send_signal(signal.SIGINT if how == "by Ctrl-C" else signal.SIGKILL)
    output, _ = script.communicate(timeout=280)
    assert script.returncode == code, output
    assert ground.living() == {}
    assert (how == "at its end") == ("the run is trained" in output), "it is waited for"
    assert (code == 120) == ("other handlers run" in output)


@pytest.mark.nightly
def test_ctrl_c_while_a_run_starts_leaves_nothing(ground: Ground) -> None:
    """At any of some moments of the start, which the machine chooses."""
    ground.then_trainer_does(FOR_EVER)
    for delay_s in (0.2, 0.8, 1.5, 3.0):
        script = start_script(SCRIPT.replace('"run"', f'"run{delay_s}"') + "run.wait()")
        time.sleep(delay_s)
        script.send_signal(signal.SIGINT)
        script.communicate(timeout=200)
        assert script.returncode != 0
    assert ground.living() == {}


def launcher_of(run: Any) -> psutil.Process:
    (found,) = [each for each in psutil.Process(run._command.pid).children() if "deploy.local.run" in command_of(each)]
    return found


def start_script(text: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ)
    )
