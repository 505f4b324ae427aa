import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from async_rl.errors import ConfigError, RunDirInUse
from async_rl.shared.locks.run_lock import lock_run, may_be_replaced, require_unlocked

HOLDER = """
import sys
from pathlib import Path
from async_rl.shared.locks.run_lock import lock_run
lock = lock_run(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.distributed
def test_a_second_run_is_refused_until_the_first_has_ended_even_by_kill(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        for refuse in (lock_run, require_unlocked):
            with pytest.raises(ConfigError, match=r"is in use by another run.*wait for its end, or name another"):
                refuse(tmp_path)
        first.kill()
    require_unlocked(tmp_path)
    with lock_run(tmp_path), pytest.raises(ConfigError):
        lock_run(tmp_path)
    lock_run(tmp_path).close()


def test_a_directory_that_no_run_has_used_is_free_and_stays_as_it_is(tmp_path: Path) -> None:
    require_unlocked(tmp_path)
    require_unlocked(tmp_path / "not made yet")
    assert list(tmp_path.iterdir()) == []


TRAINER = """
import sys
from pathlib import Path
from async_rl.shared.locks.lease import take_lease
from async_rl.shared.locks.run_lock import lock_run
lock = lock_run(Path(sys.argv[1]))
take_lease(Path(sys.argv[1]), 20.0)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.distributed
def test_a_stopped_trainer_may_be_replaced_and_one_that_runs_may_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TRAINER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        with pytest.raises(RunDirInUse):
            require_unlocked(tmp_path)
        first.send_signal(signal.SIGSTOP)
        while not may_be_replaced(tmp_path):
            time.sleep(0.01)
        require_unlocked(tmp_path)
        first.send_signal(signal.SIGCONT)
        while may_be_replaced(tmp_path):
            time.sleep(0.01)
        first.kill()
