"""The trainer's exit code after each error, which tells a launcher whether to start it again."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import async_rl.rollouts.fleet.endpoint
import async_rl.shared.weights.store_wire  # noqa: F401  # their errors, too
from async_rl.errors import AsyncRLError, ConfigError, Fenced, RunStopped
from trainer.process_end import exit_code_of


def classes(kind: type[AsyncRLError]) -> set[type[AsyncRLError]]:
    return {kind}.union(*map(classes, kind.__subclasses__()))


@pytest.mark.parametrize("kind", sorted(classes(AsyncRLError), key=lambda kind: kind.__name__))
def test_every_error_has_the_code_of_its_kind(kind: type[AsyncRLError]) -> None:
    error = kind.__new__(kind)
    code = exit_code_of(error)
    if kind is RunStopped:
        assert code == 143
    elif kind is Fenced:
        assert code == 5
    elif error.may_pass:
        assert code == 1
    else:
        assert code == (2 if issubclass(kind, ConfigError) else 4)


END = """
import logging, sys, threading, time
from async_rl.errors import RankLost
from trainer.process_end import end_now
logging.basicConfig(stream=sys.stderr)
threading.Thread(target=end_now, args=(RankLost("rank 3 is gone"),)).start()
time.sleep(60)
"""


@pytest.mark.distributed
def test_a_thread_ends_the_process_at_once_with_a_report(tmp_path: Path) -> None:
    report = tmp_path / "error.json"
    done = subprocess.run(
        [sys.executable, "-c", END],
        env={"TORCHELASTIC_ERROR_FILE": str(report), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 1 and "RankLost: rank 3 is gone" in done.stderr, done.stderr
    assert json.loads(report.read_text())["message"]["message"] == "RankLost: rank 3 is gone"


RANK = """
import os, time
from trainer.process_end import end_with_torchrun
end_with_torchrun()
print(os.getpid(), flush=True)
time.sleep(120)
"""


@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="a signal of Linux")
def test_a_rank_does_not_outlive_torchrun(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    torchrun = subprocess.Popen([*command, str(tmp_path / "rank.py")], stdout=subprocess.PIPE, text=True)
    with torchrun:
        assert torchrun.stdout is not None
        rank = psutil.Process(int(torchrun.stdout.readline()))
        torchrun.kill()
        rank.wait(60)
