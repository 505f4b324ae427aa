"""Ctrl-C while a program starts, and afterwards."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

INTERRUPT = "import os, signal, sys\n{}os.kill(os.getpid(), signal.SIGINT)\nprint('still there', sys.argv[1:])\n"
PARSE = "from async_rl.programs.command_line import Parser\nParser('x', 'X.', '').parse_args([])\n"


def start(tmp_path: Path, code: str) -> "subprocess.CompletedProcess[str]":
    (tmp_path / "slow_program.py").write_text(code)
    command = [sys.executable, "-m", "async_rl.programs.start", "slow_program", "1", "--two"]
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
