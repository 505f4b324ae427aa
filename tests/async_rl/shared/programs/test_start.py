"""Ctrl-C while a program starts, and afterwards; the working directory, which decides nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.cli import PROGRAMS

pytestmark = pytest.mark.distributed

INTERRUPT = "import os, signal, sys\n{}os.kill(os.getpid(), signal.SIGINT)\nprint('still there', sys.argv[1:])\n"
PARSE = "from async_rl.shared.programs.command_line import Parser\nParser('x', 'X.', '').parse_args([])\n"


def start(tmp_path: Path, code: str) -> "subprocess.CompletedProcess[str]":
    (tmp_path / "slow_program.py").write_text(code)
    command = [sys.executable, "-m", "async_rl.shared.programs.start", "slow_program", "1", "--two"]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)


def test_while_its_imports_go_on_it_ends_silently(tmp_path: Path) -> None:
    done = start(tmp_path, INTERRUPT.format(""))
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_afterwards_it_is_interrupted_as_any_program_in_python(tmp_path: Path) -> None:
    done = start(tmp_path, INTERRUPT.format(PARSE))
    assert "still there" not in done.stdout and "KeyboardInterrupt" in done.stderr


def test_it_is_the_program_that_it_starts(tmp_path: Path) -> None:
    done = start(tmp_path, "import sys\nprint(__name__, sys.argv[1:], __file__.endswith('slow_program.py'))")
    assert done.stdout == "__main__ ['1', '--two'] True\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_it_ends_silently_where_nobody_reads_its_output(tmp_path: Path, unbuffered: str) -> None:
    (tmp_path / "slow_program.py").write_text("print('a line')")
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "async_rl.shared.programs.start", "slow_program"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("output", ["|cat", ">&-"])
def test_another_pipe_that_broke_is_an_error(tmp_path: Path, output: str) -> None:
    (tmp_path / "slow_program.py").write_text("raise BrokenPipeError('of a peer')")
    command = f"{sys.executable} -m async_rl.shared.programs.start slow_program {output}"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert done.stderr.endswith("BrokenPipeError: of a peer\n")


def test_it_runs_without_any_output(tmp_path: Path) -> None:
    (tmp_path / "slow_program.py").write_text("print('a line')")
    command = f"{sys.executable} -m async_rl.shared.programs.start slow_program >&-"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


DECOYS = ("trainer", "inference_service", "deploy", "benchmarks", "tests", "random", "signal", "logging", "queue")
BY_DAY = ("run", "serve")
COMMANDS = {
    # As the console script, which has its own folder at the head of the search path.
    **{name: ["-P", "-m", "async_rl.cli", name] for name in PROGRAMS},
    "trainer": ["-m", "async_rl.trainer"],
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in (*BY_DAY, "trainer") else pytest.mark.nightly) for name in COMMANDS],
)
def test_a_command_is_ours_whatever_the_working_directory_holds(name: str, tmp_path: Path) -> None:
    for decoy in DECOYS:
        (tmp_path / f"{decoy}.py").write_text(f"raise SystemExit('the user's {decoy}.py')\n")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, *COMMANDS[name], "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")
