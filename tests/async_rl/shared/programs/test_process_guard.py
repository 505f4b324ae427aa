"""The guard of a process: what it leaves behind, and while it runs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from async_rl.shared.programs import process_guard
from async_rl.shared.programs.process_guard import PRODUCER_MARK, StopWatch
from tests.support.clock import Clock
from tests.support.waiting import wait_for

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
    children = psutil.Process(guard.pid).children
    wait_for(lambda: len(children()) <= 1, said=children)
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


STOPS_A_CHILD = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
os.kill(child.pid, signal.SIGSTOP)
time.sleep(600)
"""
STOPS_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.mark.parametrize("stops", [STOPS_ITSELF, STOPS_A_CHILD])
def test_a_command_is_killed_when_it_or_what_it_has_started_was_stopped_for_too_long(stops: str) -> None:
    words = [sys.executable, "-I", "-S", process_guard.__file__, "--grace-s", "600", "--stopped-after-s", "0.5"]
    guard = subprocess.Popen(
        [*words, "--", sys.executable, "-I", "-S", "-c", stops], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    # Its standard input stays open: its end would be the starter's.
    assert guard.wait(60) == 128 + signal.SIGKILL
    said = guard.communicate()[1].decode()
    assert f"{sys.executable} -I -S -c " in said and "was stopped by a signal for more than 0.5 s" in said


def sleeper(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", "-c", "import time; print(flush=True); time.sleep(600)"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = sleeper({})
    yield process
    process.kill()
    process.communicate()


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    wait_for_status(process, psutil.STATUS_STOPPED)


def wait_for_status(process: subprocess.Popen[bytes], *statuses: str) -> None:
    wait_for(lambda: psutil.Process(process.pid).status() in statuses)


def found_after(clock: Clock, watch: StopWatch, duration_s: float) -> set[int]:
    """The processes that it finds in so long a time, in which it is called as it should be."""
    found: set[int] = set()
    for _ in range(round(duration_s / watch.interval_s)):
        clock.now_s += watch.interval_s
        found |= watch.find().keys()
    return found


def test_one_is_found_after_the_limit_and_not_before(child: subprocess.Popen[bytes]) -> None:
    watch = StopWatch(os.getpid(), 60.0, clock := Clock())
    assert found_after(clock, watch, 600) == set()
    stop(child)
    assert found_after(clock, watch, 55) == set()
    assert found_after(clock, watch, 15) == {child.pid}
    assert not watch.find(), "it has just looked"


def test_one_that_goes_on_before_the_limit_is_not_found(child: subprocess.Popen[bytes]) -> None:
    watch = StopWatch(os.getpid(), 60.0, clock := Clock())
    for _ in range(3):
        stop(child)
        assert found_after(clock, watch, 55) == set()
        child.send_signal(signal.SIGCONT)
        wait_for_status(child, psutil.STATUS_SLEEPING)
        assert found_after(clock, watch, 10) == set()


def test_one_that_computes_between_its_stops_is_not_found() -> None:
    busy = subprocess.Popen([sys.executable, "-I", "-S", "-c", "while True: pass"])
    watch = StopWatch(os.getpid(), 60.0, clock := Clock())
    try:
        for _ in range(20):
            stop(busy)
            assert found_after(clock, watch, watch.interval_s) == set()
            before = psutil.Process(busy.pid).cpu_times()
            busy.send_signal(signal.SIGCONT)
            while psutil.Process(busy.pid).cpu_times() == before:
                time.sleep(0.01)
    finally:
        busy.kill()
        busy.wait()


def test_time_in_which_the_watch_itself_did_not_run_does_not_count(child: subprocess.Popen[bytes]) -> None:
    watch = StopWatch(os.getpid(), 60.0, clock := Clock())
    stop(child)
    for _ in range(3):
        clock.now_s += 1e6
        assert not watch.find(), "all were stopped together, or the machine was"
    assert found_after(clock, watch, 70) == {child.pid}


def test_a_producer_and_what_it_has_started_is_left_to_the_ranks(child: subprocess.Popen[bytes]) -> None:
    marked = sleeper({PRODUCER_MARK: "one"})
    watch = StopWatch(os.getpid(), 60.0, clock := Clock())
    try:
        stop(marked)
        assert found_after(clock, watch, 300) == set()
        stop(child)
        assert found_after(clock, watch, 300) == {child.pid}
    finally:
        marked.kill()
        marked.communicate()


def test_others_than_those_below_the_root_are_not_looked_at(child: subprocess.Popen[bytes]) -> None:
    other = sleeper({})
    watch = StopWatch(other.pid, 60.0, clock := Clock())
    try:
        stop(child)
        assert found_after(clock, watch, 300) == set()
        stop(other)
        assert found_after(clock, watch, 300) == {other.pid}
    finally:
        other.kill()
        other.communicate()
