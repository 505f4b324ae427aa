"""Guards one process of a run: `python -m async_rl.shared.programs.process_guard --cores 0,1 --grace-s 10 -- COMMAND`.

It starts the command and keeps running, so that no process of it outlives its starter: a deployer, or a trainer that
runs agents. The starter holds the other end of the guard's standard input: when it closes that pipe, or dies for any
reason (also by `kill -9`), the guard reads the end of the pipe and ends the command: SIGTERM, and SIGKILL after the
grace time; at once if the starter has written `KILL` before. On Linux it is also the subreaper of all its descendants,
so workers in their own sessions (torchrun's, process pools') end with them.

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
from collections.abc import Iterator, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05
KILL = b"k"
BAD_INPUT = 2
"""As in `deploy.cluster.restarts`, which is not imported: a program that cannot be run is not tried again."""


def keep(command: Sequence[str], cores: Sequence[int], grace_s: float, stdin: str = os.devnull) -> int:
    """Runs `command`, which reads the file `stdin`, until it exits or standard input closes; returns its exit code."""
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
    with _reaping_orphans(child.pid):
        ended_by_us = _wait_for_child_or_closed_pipe(child)
    if ended_by_us:
        _end(child, 0.0 if os.read(sys.stdin.fileno(), len(KILL)) == KILL else grace_s)
    _kill_what_is_left(child.pid)
    code = child.returncode
    return code if code >= 0 else 128 - code


def _wait_for_child_or_closed_pipe(child: subprocess.Popen[bytes]) -> bool:
    """Waits for the first of the two; True if the pipe closed, which means that the starter closed it or died."""
    with _end_of(child) as ends:
        while child.poll() is None:
            readable, _, _ = select.select([sys.stdin, *ends], [], [], None if ends else POLL_S)
            if sys.stdin in readable:
                return child.poll() is None
    return False


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
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _parent_and_state(entry) == (me, True):
            found.append(int(entry.name))
    return found


def _parent_and_state(entry: Path) -> tuple[int, bool]:
    """Parent's process id and whether the process is alive (not a zombie); (0, False) if it has ended."""
    try:
        # The second field, the name in parentheses, may itself contain spaces and parentheses.
        state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return 0, False
    return int(parent), state not in "ZX"


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
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND ARGUMENTS")
    arguments = parser.parse_args(argv)
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    cores = [int(core) for core in arguments.cores.split(",") if core]
    # A deployer handles the terminal's Ctrl-C; the guard waits for the pipe to close. Slurm sends SIGTERM to every
    # process of a job; a handler, unlike SIG_IGN, is not inherited by the command, which has to act on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        return keep(command, cores, arguments.grace_s, arguments.stdin)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"cannot run {error.filename!r}: {error.strerror}", file=sys.stderr)
        return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
