"""Guards one process of a run: `python -m async_rl.shared.programs.process_guard --cores 0,1 --grace-s 10 -- COMMAND`.

It starts the command and keeps running, so that no process of it outlives its starter: a deployer, or a trainer that
runs agents. The starter holds the other end of the guard's standard input: when it closes that pipe, or dies for any
reason (also by `kill -9`), the guard reads the end of the pipe and ends the command: SIGTERM, and SIGKILL after the
grace time; at once if the starter has written `KILL` before. On Linux it is also the subreaper of all its descendants,
so workers in their own sessions (torchrun's, process pools') end with them.

With `--stopped-after-s` it also kills a command that a signal has stopped, or one of its processes: see `StopWatch`.

It exits with the command's own code, or 128 + N where signal N ended the command, or 2 where the command cannot be run.
Standard library only: it must start in milliseconds.
"""

import argparse
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05
KILL = b"k"
BAD_INPUT = 2
"""As in `deploy.cluster.restarts`, which is not imported: a program that cannot be run is not tried again."""

PRODUCER_MARK = "ASYNC_RL_PRODUCER"
"""In the environment of a producer and of all that it starts, such as the workers of rewards and what these start."""

LOOKS_PER_LIMIT = 12
STOPPED_STATE = "T"
"""By a signal: one that a debugger holds is in another state."""


class StopWatch:
    """Finds processes that a signal has stopped, such as SIGSTOP: they keep what they hold, and nothing else tells.

    Whoever has started them calls `find` every `interval_s`; it does nothing where it has just looked. It looks at
    those below `root` and, where that is another one, at `root` itself, on Linux. It leaves out a producer and what
    that has started: the training ranks notice a silent producer, and a user's program that stops itself has a limit of
    its own.

    A process counts as stopped while it is in that state and has computed nothing since the last call, so one that
    cpulimit stops and continues by turns goes on. The time in which the caller itself did not run does not count: where
    all were stopped together, as by `scontrol suspend`, all go on together.

    Args:
        limit_s: so long a process may be stopped.
    """

    def __init__(self, root: int, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.interval_s = limit_s / LOOKS_PER_LIMIT
        self._root = root
        self._limit_s = limit_s
        self._clock = clock
        self._last_s = clock()
        self._stopped: dict[tuple[int, str], tuple[str, float]] = {}
        """By process number and start: the time that it has computed, and that it has been stopped, in seconds."""

    def find(self) -> dict[int, str]:
        """The processes that were stopped for longer than the limit, each with a description."""
        now = self._clock()
        if now - self._last_s < self.interval_s / 2:
            return {}
        step_s, self._last_s = min(now - self._last_s, 2 * self.interval_s), now
        parents: dict[int, int] = {}
        found: dict[tuple[int, str], tuple[str, float]] = {}
        for pid, stat in _stats():
            parents[pid] = stat.parent
            if stat.state == STOPPED_STATE:
                computed, stopped_s = self._stopped.get((pid, stat.started), ("", 0.0))
                found[pid, stat.started] = stat.computed, stopped_s + step_s if computed == stat.computed else 0.0
        self._stopped = {key: value for key, value in found.items() if self._is_ours(key[0], parents)}
        return {
            pid: f"process {pid} ({_command_line(pid)}) was stopped by a signal for more than {self._limit_s:g} s"
            for (pid, _), (_, stopped_s) in self._stopped.items()
            if stopped_s > self._limit_s
        }

    def _is_ours(self, pid: int, parents: dict[int, int]) -> bool:
        while pid != self._root:
            if not pid or _is_producers(pid):
                return False
            pid = parents.get(pid, 0)
        return True


def keep(
    command: Sequence[str],
    cores: Sequence[int],
    grace_s: float,
    stdin: str = os.devnull,
    stopped_after_s: float | None = None,
) -> int:
    """Runs `command`, which reads the file `stdin`, until it exits or standard input closes; returns its exit code.

    With `stopped_after_s` it is killed when it, or a process of it, was stopped for so long.
    """
    if sys.platform == "linux":
        if cores:
            os.sched_setaffinity(0, cores)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
    with Path(stdin).open("rb") as file:
        child = subprocess.Popen(
            command,
            stdin=file,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    watch = StopWatch(child.pid, stopped_after_s) if stopped_after_s is not None else None
    with _reaping_orphans(child.pid):
        time_to_end_s = _wait(child, grace_s, watch)
    if time_to_end_s is not None:
        _end(child, time_to_end_s)
    _kill_what_is_left(child.pid)
    code = child.returncode
    return code if code >= 0 else 128 - code


def _wait(child: subprocess.Popen[bytes], grace_s: float, watch: StopWatch | None) -> float | None:
    """Waits for the first of three: the child ends, the pipe closes, or a process is stopped for too long.

    Returns the seconds that the child has to end by itself; None if it has ended.
    """
    with _end_of(child) as ends:
        while child.poll() is None:
            # Without a descriptor for its end the child is looked at in short intervals.
            timeout_s = (None if watch is None else watch.interval_s) if ends else POLL_S
            readable, _, _ = select.select([sys.stdin, *ends], [], [], timeout_s)
            if sys.stdin in readable and child.poll() is None:
                # The starter has closed it, or died.
                return 0.0 if os.read(sys.stdin.fileno(), len(KILL)) == KILL else grace_s
            if watch is not None and not readable and (found := watch.find()):
                print(f"process_guard: {', '.join(found.values())}: all are killed", file=sys.stderr, flush=True)
                return 0.0
    return None


@contextlib.contextmanager
def _reaping_orphans(child: int) -> Iterator[None]:
    """Orphans become our children: a command that runs for days would fill the table of processes with dead ones."""
    if sys.platform != "linux":
        yield
        return
    signal.signal(signal.SIGCHLD, lambda number, frame: _reap_all_but(child))
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _reap_all_but(child: int) -> None:
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == child:
                return
            os.waitpid(ended.si_pid, 0)


@contextlib.contextmanager
def _end_of(child: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """A descriptor that is readable when the child has ended; none where the system has no such thing."""
    try:
        descriptor = os.pidfd_open(child.pid)
    except (AttributeError, OSError):
        yield []
        return
    try:
        yield [descriptor]
    finally:
        os.close(descriptor)


def _end(child: subprocess.Popen[bytes], grace_s: float) -> None:
    if grace_s:
        child.terminate()
    try:
        child.wait(grace_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _kill_what_is_left(group: int) -> None:
    """Kills the command's process group and, on Linux, every descendant: orphans are reparented here."""
    # The group may be empty already; macOS returns EPERM for zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    if sys.platform != "linux":
        return
    while children := _children():
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)


def _children() -> list[int]:
    """Living children of this process; the command itself has been waited for by now."""
    me = os.getpid()
    return [pid for pid, stat in _stats() if stat.parent == me and stat.state not in "ZX"]


@dataclass(frozen=True, slots=True)
class _Stat:
    """Of a process, as /proc/PID/stat has it."""

    parent: int
    state: str
    computed: str
    """Its time on the processor, in user and system mode."""
    started: str


def _stats() -> Iterator[tuple[int, _Stat]]:
    """All processes of this host that run or wait to be waited for; none where the system has no /proc."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            # The second field, the name in parentheses, may itself contain spaces and parentheses.
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
            computed = f"{fields[11]} {fields[12]}"
            yield int(entry.parent.name), _Stat(int(fields[1]), fields[0], computed, fields[19])


def _is_producers(pid: int) -> bool:
    return f"{PRODUCER_MARK}=".encode() in _content(pid, "environ")


def _command_line(pid: int) -> str:
    return _content(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def _content(pid: int, name: str) -> bytes:
    """Empty for a process that has ended, or belongs to somebody else."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def end_with_parent() -> None:
    """Has Linux kill this process when its parent dies without ending it, as by `kill -9`; elsewhere does nothing.

    It holds for the program that the process becomes, too. The trainer's ranks and the producer call it as well.

    Raises:
        OSError: Linux refuses it.
    """
    if sys.platform == "linux":
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="async_rl.shared.programs.process_guard")
    parser.add_argument("--cores", default="", help="comma-separated CPU cores to stay on; empty for any")
    parser.add_argument("--grace-s", type=float, default=10.0, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("--stdin", default=os.devnull, help="the file that the command reads as its standard input")
    parser.add_argument("--stopped-after-s", type=float, help="a process stopped by a signal for so long is killed")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND ARGUMENTS")
    arguments = parser.parse_args(argv)
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    cores = [int(core) for core in arguments.cores.split(",") if core]
    # A deployer handles the terminal's Ctrl-C; the guard waits for the pipe to close. Slurm sends SIGTERM to every
    # process of a job; a handler, unlike SIG_IGN, is not inherited by the command, which has to act on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        return keep(command, cores, arguments.grace_s, arguments.stdin, arguments.stopped_after_s)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"cannot run {error.filename!r}: {error.strerror}", file=sys.stderr)
        return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
