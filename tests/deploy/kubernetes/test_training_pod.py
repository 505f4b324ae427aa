"""The exit code of a training pod, after real torchrun, whose own code is always 1."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

RAISES = """
import os
from async_rl import errors
from async_rl.programs.failure_report import report_failure
report_failure(errors.{error}("why"), os.environ)
raise SystemExit(1)
"""

SAVES_ON_SIGTERM = """
import pathlib, signal, sys
def save(*_):
    pathlib.Path("saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
pathlib.Path("ready").touch()
signal.pause()
"""


def start(folder: Path, script: str) -> "subprocess.Popen[str]":
    program = folder / "rank.py"
    program.write_text(script)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(program)]
    return subprocess.Popen(
        [sys.executable, "-m", "deploy.kubernetes.training_pod", "--", *torchrun],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("", 0),
        ("raise SystemExit(1)", 1),
        ("import os; os.kill(os.getpid(), 9)", 1),
        (RAISES.format(error="PublishError"), 1),
        (RAISES.format(error="ConfigError"), 2),
        (RAISES.format(error="OnPolicyViolation"), 4),
        (RAISES.format(error="Fenced"), 5),
        (RAISES.format(error="RunStopped"), 143),
    ],
    ids=["trained", "unnamed", "killed", "may pass", "bad input", "lasting", "fenced", "stopped"],
)
def test_the_code_tells_what_ended_the_ranks(tmp_path: Path, script: str, code: int) -> None:
    process = start(tmp_path, script)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == code, said


def test_sigterm_reaches_the_ranks_which_save_first(tmp_path: Path) -> None:
    process = start(tmp_path, SAVES_ON_SIGTERM)
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert (tmp_path / "saved").exists()
