"""The guard of a process: what it leaves behind, and while it runs."""

import subprocess
import sys
import time

import psutil
import pytest

from async_rl.shared.programs import process_guard

pytestmark = pytest.mark.distributed

ORPHANS = """
import os, sys, time
for _ in range(50):
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(0.05)
        os._exit(0)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
print("made", flush=True)
sys.stdin.read()
time.sleep(600)
"""


IGNORES_SIGTERM = [
    *(sys.executable, "-c"),
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)",
]


def test_orphans_of_a_command_that_goes_on_are_reaped_and_its_exit_code_is_kept() -> None:
    command = [
        sys.executable,
        "-I",
        "-S",
        process_guard.__file__,
        "--grace-s",
        "1",
        "--",
        sys.executable,
        "-c",
        ORPHANS,
    ]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert guard.stdin is not None and guard.stdout is not None
    assert guard.stdout.readline() == b"made\n"
    deadline = time.monotonic() + 60
    while len(psutil.Process(guard.pid).children()) > 1:
        assert time.monotonic() < deadline, psutil.Process(guard.pid).children()
        time.sleep(0.05)
    guard.stdin.close()
    assert guard.wait(60) == 128 + 15
    guard.stdout.close()


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_command_is_killed_at_once_where_its_starter_says_so(is_stopped: bool) -> None:
    command = [*(sys.executable, "-I", "-S", process_guard.__file__, "--grace-s", "600", "--"), *IGNORES_SIGTERM]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert guard.stdin is not None and guard.stdout is not None
    assert guard.stdout.readline() == b"deaf\n"
    (child,) = psutil.Process(guard.pid).children()
    if is_stopped:
        child.suspend()
    guard.stdin.write(process_guard.KILL)
    guard.stdin.close()
    assert guard.wait(60) == 128 + 9 and not child.is_running()
    guard.stdout.close()
