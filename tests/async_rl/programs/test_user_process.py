"""Processes that run a user's code: what the code reaches of its pipes, and how each of them ends."""

import asyncio
import os
import signal
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rl.config.reward_section import RewardSection
from async_rl.programs import user_process
from async_rl.programs.user_process import LENGTH, end_group_after, exit_code, kill_group, reap, start_process
from async_rl.rollout.program_mark import Mark
from tests.support import ROOT

pytestmark = pytest.mark.distributed

HEAD = """
import os, signal, subprocess, sys, time
from async_rl.programs.user_process import take_pipes

requests, answers = take_pipes()

def answer(value):
    answers.write(f"{value!r}\\n".encode())
    answers.flush()

def forked():
    child = os.fork()
    if not child:
        time.sleep(3600)
    return child

def program():
    return subprocess.Popen(["sleep", "3600"]).pid
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`run(code, check)` awaits `check(process)` of a process that runs the code."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(ROOT))))

    def start(code: str, check: Callable[[Process], Coroutine[Any, Any, Any]]) -> Any:
        (tmp_path / "user_code.py").write_text(HEAD + code)

        async def checked() -> Any:
            process = await start_process("user_code")
            try:
                return await asyncio.wait_for(check(process), 60)
            finally:
                kill_group(process)
                await reap(process)

        return asyncio.run(checked())

    return start


async def answer_of(process: Process) -> bytes:
    assert process.stdout is not None
    return await process.stdout.readline()


async def end_of(pid: int) -> None:
    """Until a process that is not a child of this one is gone."""
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        await asyncio.sleep(0.01)


def test_what_the_code_reads_is_empty_and_what_it_prints_is_no_answer(run, capfd: pytest.CaptureFixture[str]) -> None:
    code = """
print("said by Python", flush=True)
os.write(1, b"said to the descriptor")
program = [sys.executable, "-c", "import sys; print(len(sys.stdin.read()))"]
answer((sys.stdin.read(), subprocess.run(program, capture_output=True).stdout, requests.readline()))
"""

    async def check(process: Process) -> None:
        assert process.stdin is not None
        process.stdin.write(b"request\n")
        assert await answer_of(process) == b"('', b'0\\n', b'request\\n')\n"

    run(code, check)
    assert "said by Python\nsaid to the descriptor" in capfd.readouterr().err


def test_ctrl_c_is_left_to_the_parent(run) -> None:
    async def check(process: Process) -> None:
        assert await answer_of(process) == b"'ready'\n"
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdin is not None
        process.stdin.write(b"still there\n")
        assert await answer_of(process) == b"b'still there\\n'\n"

    run("answer('ready')\nanswer(requests.readline())\n", check)


@pytest.mark.parametrize("child", ["program", "forked"])
def test_a_process_that_ends_takes_along_what_it_started(run, child: str) -> None:
    """The child holds the output too, so that the end of the process is not seen there."""

    async def check(process: Process) -> None:
        left = int(await answer_of(process))
        await end_group_after(process)
        await end_of(left)
        assert await exit_code(process) == 7

    run(f"answer({child}())\nos._exit(7)\n", check)


def test_a_killed_process_takes_along_what_it_started_whatever_that_ignores(run) -> None:
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nanswer(forked())\ntime.sleep(3600)\n"

    async def check(process: Process) -> None:
        left = int(await answer_of(process))
        kill_group(process)
        await end_of(left)
        assert await exit_code(process) == -signal.SIGKILL
        kill_group(process)

    run(code, check)


def test_a_process_that_closes_its_output_and_goes_on_is_killed(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_process, "EXIT_TIMEOUT_S", 0.1)

    async def check(process: Process) -> None:
        assert await answer_of(process) == b""
        assert await exit_code(process) == "unknown: it closed its output and was killed"
        await reap(process)
        assert process.returncode == -signal.SIGKILL

    run("os.closerange(0, 64)\ntime.sleep(3600)\n", check)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["reward", "program"])
def test_a_process_whose_parent_dies_amid_a_message_ends(tmp_path: Path, kind: str) -> None:
    (tmp_path / "own.py").write_text("async def own(*_):\n    return [0.0]\n")
    _, fd = Mark.make()
    arguments = {
        "reward": ["async_rl.rewards.worker", RewardSection(name=f"python:{tmp_path}/own.py:own").model_dump_json()],
        "program": ["async_rl.rollout.program_worker", f"python:{tmp_path}/own.py:own", str(fd)],
    }
    with subprocess.Popen(
        [sys.executable, "-m", *arguments[kind]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[fd]
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.read(LENGTH.size), "it has loaded"
        process.stdin.write(LENGTH.pack(1000) + b"half")
        process.stdin.close()
        assert process.wait(20) == 0
