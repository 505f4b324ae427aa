"""Programs in a sandbox: what they are given, how they may end, many at once, and what cancelling leaves."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rl.parts.sandbox import Limits, Outcome, Program, Sandbox, open_sandbox
from tests.support.hostile_programs import DAEMON
from tests.support.sandbox_worker import processes_with
from tests.support.waiting import wait_for

pytestmark = pytest.mark.distributed

SOON_S = 20.0
"""For what takes milliseconds, on a machine whose cores others use."""


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return asyncio.run(open_sandbox())


@pytest.fixture
def run(sandbox: Sandbox) -> Callable[..., Outcome]:
    def run(program: Program | str, **limits: Any) -> Outcome:
        program = Program(program) if isinstance(program, str) else program
        return asyncio.run(sandbox.run(program, Limits(**limits)))

    return run


def test_a_program_has_its_input_its_files_and_the_standard_library(run: Callable[..., Outcome]) -> None:
    source = "import json, sys, helper\nprint(json.dumps([helper.N, open('data/x').read(), input(), __name__]))"
    files = {"helper.py": b"N = 3", "data/x": b"text"}
    outcome = run(Program(source, stdin=b"input", files=files))
    assert (outcome.status, outcome.exit_code, outcome.stderr) == ("ok", 0, b"")
    assert outcome.stdout == b'[3, "text", "input", "__main__"]\n'


def test_a_program_may_be_a_command_of_the_system(run: Callable[..., Outcome]) -> None:
    program = Program(argv=("sh", "-c", "cat; cat data; echo $HOME >&2; exit 3"), stdin=b"a", files={"data": b"b"})
    outcome = run(program)
    assert (outcome.status, outcome.exit_code, outcome.stdout) == ("error", 3, b"ab")
    assert run(Program(argv=("no-such-command",))).exit_code == 127


def test_a_program_may_use_processes_threads_and_locks(run: Callable[..., Outcome]) -> None:
    source = """
import multiprocessing, subprocess, tempfile, threading
def square(n): return n * n
with multiprocessing.Pool(2) as pool:
    print(pool.map(square, [1, 2, 3]))
thread = threading.Thread(target=print, args=["thread"]); thread.start(); thread.join()
with tempfile.NamedTemporaryFile() as file: file.write(b"x")
print(subprocess.run(["echo", "child"], capture_output=True).stdout)
"""
    outcome = run(source)
    assert outcome.stdout == b"[1, 4, 9]\nthread\nb'child\\n'\n", outcome.stderr


@pytest.mark.parametrize(
    ("source", "status", "exit_code", "says"),
    [
        ("", "ok", 0, ""),
        ("raise SystemExit", "ok", 0, ""),
        ("raise SystemExit(7)", "error", 7, ""),
        ("raise SystemExit('why')", "error", 1, "why"),
        ("import sys; sys.exit(256 + 3)", "error", 3, ""),
        ("1 / 0", "error", 1, 'File "/tmp/program.py", line 1, in <module>\n    1 / 0'),
        ("print(", "error", 1, "SyntaxError"),
        ("\0", "error", 1, "null bytes"),
        ("import os; os.kill(os.getpid(), 15)", "error", 128 + 15, ""),
        ("bytearray(10**10)", "memory", 251, "MemoryError"),
    ],
)
def test_how_a_program_ends_is_told(
    run: Callable[..., Outcome], source: str, status: str, exit_code: int, says: str
) -> None:
    outcome = run(source)
    assert (outcome.status, outcome.exit_code) == (status, exit_code), outcome
    assert says in outcome.stderr.decode()
    assert "confinement" not in outcome.stderr.decode()


def test_output_up_to_the_limit_is_kept(run: Callable[..., Outcome]) -> None:
    source = "import sys\nprint('x' * 999)\nprint('y' * {}, file=sys.stderr)"
    assert run(source.format(999), output_bytes=1000).status == "ok"
    outcome = run(source.format(1000), output_bytes=1000)
    assert (outcome.status, outcome.exit_code, len(outcome.stderr)) == ("output", None, 1000)


def test_time_is_counted_from_the_start_of_the_program(run: Callable[..., Outcome]) -> None:
    outcome = run("import time\nprint(1, flush=True)\ntime.sleep(99)", wall_s=3.0)
    assert (outcome.status, outcome.stdout) == ("timeout", b"1\n")
    assert 3.0 <= outcome.seconds < 3.0 + SOON_S
    assert run("while True: pass", cpu_s=1, wall_s=60).status == "timeout"


def test_many_programs_at_once_have_nothing_in_common(sandbox: Sandbox) -> None:
    source = """
import os, pathlib, sys, time
own = sys.stdin.read()
before = sorted(os.listdir("."))
pathlib.Path("name").write_text(own)
time.sleep(0.5)
print(before, pathlib.Path("name").read_text())
"""

    async def all_of_them() -> list[Outcome]:
        # Their starts alone take seconds on two cores.
        limits = Limits(wall_s=120)
        return await asyncio.gather(*(sandbox.run(Program(source, stdin=b"%d" % i), limits) for i in range(40)))

    outcomes = asyncio.run(all_of_them())
    assert [outcome.stdout.decode() for outcome in outcomes] == [f"['program.py'] {i}\n" for i in range(40)]


def test_a_cancelled_call_leaves_nothing(sandbox: Sandbox) -> None:
    mark = f"cancelled-{os.getpid()}"

    async def cancel() -> None:
        call = asyncio.create_task(sandbox.run(Program(DAEMON, stdin=mark.encode()), Limits(wall_s=100)))
        while not await asyncio.to_thread(processes_with, mark):
            await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        # Not a moment later: the call itself has waited for the end.
        assert not processes_with(mark)

    asyncio.run(asyncio.wait_for(cancel(), SOON_S))


def test_calls_cancelled_at_any_moment_leave_nothing(sandbox: Sandbox) -> None:
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    mark = f"any-moment-{os.getpid()}"

    async def cancel(after_s: float) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(after_s):
                await sandbox.run(Program(DAEMON, stdin=mark.encode()), Limits(wall_s=100))

    async def cancel_all() -> None:
        await asyncio.gather(*(cancel(i * 0.005) for i in range(40)))

    asyncio.run(cancel_all())
    wait_for(lambda: not processes_with(mark))
    assert len(list(Path("/proc/self/fd").iterdir())) <= open_before
