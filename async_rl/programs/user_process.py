"""Processes that run a user's code: how they are started, and how they end; for rewards and rollouts.

A new interpreter, not a fork: it has none of the trainer's threads, torch state and network connections. Messages go
over two pipes, each after its length. The process is the first of a group, which is killed as a whole.
"""

import asyncio
import contextlib
import os
import pickle
import signal
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

LENGTH = struct.Struct(">Q")
"""In front of each message, on both pipes."""

MAX_FRAME_BYTES = 64 * 2**20
"""The longest message that is taken from a process whose code is not ours."""

EXIT_TIMEOUT_S = 10.0
"""How long a process whose output has ended may take to end itself; most do at once, but on a busy machine."""

EXIT_POLL_S = 0.1

MORE_ROOM = "raise the limits of open files and processes (ulimit -n, -u)"
"""The remedy for a process that cannot be started."""

REAP_TIMEOUT_S = 5.0
"""How long a killed process may take to disappear; after that it is not awaited."""


async def start_process(module: str, *arguments: str, pass_fds: Sequence[int] = ()) -> Process:
    """Runs `python -m MODULE ARGUMENTS` with pipes as its standard input and output."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=PIPE,
        stdout=PIPE,
        # Its own process group, which is killed as a whole.
        start_new_session=True,
        pass_fds=pass_fds,
    )


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Inside the process: the pipes from and to the parent, which the user's code cannot reach by mistake.

    If it reads its standard input, as generated code may, that is empty; what it prints goes to standard error.
    """
    # Ctrl-C is sent to the whole process group; the trainer ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return requests, answers


def messages(requests: BinaryIO) -> Iterator[Any]:
    """Inside the process: the parent's messages until its end of the pipe closes, also in the middle of one, as where
    the parent was killed."""
    while len(header := requests.read(LENGTH.size)) == LENGTH.size:
        (length,) = LENGTH.unpack(header)
        message = requests.read(length)
        if len(message) < length:
            return
        yield pickle.loads(message)


def cpu_s(process: Process) -> float:
    """Processor seconds of a process and its threads; 0 of one that has ended."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def kill_group(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


async def end_group_after(process: Process) -> None:
    """Kills the processes left behind by one that ended: they may keep its output open, which hides its end."""
    while process.returncode is None:
        await asyncio.sleep(EXIT_POLL_S)
    kill_group(process)


async def exit_code(process: Process) -> int | str:
    """The exit code of a process whose output has ended; if it closed that and still runs, it is killed."""
    try:
        return await asyncio.wait_for(process.wait(), EXIT_TIMEOUT_S)
    except TimeoutError:
        kill_group(process)
        return "unknown: it closed its output and was killed"


async def reap(process: Process) -> None:
    """Waits for the end of a killed process, `REAP_TIMEOUT_S` at most."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), REAP_TIMEOUT_S)
