"""How a worker process is started, what it and its parent share, and how it ends.

A new interpreter, not a fork: it has none of the trainer's threads, torch state and network connections. Messages go
over two pipes, each after its length; which call the process is running is a word of shared memory. The process is the
first of a group, which is killed as a whole.
"""

import asyncio
import contextlib
import mmap
import os
import signal
import struct
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import BinaryIO

LENGTH = struct.Struct(">Q")
"""In front of each message, on both pipes."""

MAX_FRAME_BYTES = 64 * 2**20
"""The longest message that is taken from a process whose code is not ours."""

EXIT_TIMEOUT_S = 10.0
"""How long a process whose output has ended may take to end itself; most do at once, but on a busy machine."""

REAP_TIMEOUT_S = 5.0
"""How long a killed process may take to disappear; after that it is not awaited."""


class Mark:
    """The number of the call that a process runs, 0 for none, and a count of all steps, in a file of `SIZE_BYTES`.

    It survives the process, so that one that exits or crashes shows whose code did it; and it can be read while the
    process answers nothing, because some code does not let the interpreter go.
    """

    SIZE_BYTES = 16

    def __init__(self, path: str) -> None:
        with Path(path).open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), self.SIZE_BYTES)).cast("Q")

    def read(self) -> tuple[int, int]:
        """The call that is running and the number of steps so far."""
        return self._words[0], self._words[1]

    def begin(self, number: int) -> None:
        """A step of a call begins."""
        self._words[0] = number
        self._words[1] += 1

    def end(self) -> None:
        self._words[0] = 0


async def start_process(module: str, *arguments: str) -> Process:
    """Runs `python -m MODULE ARGUMENTS` with pipes as its standard input and output."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=PIPE,
        stdout=PIPE,
        # Its own process group, which is killed as a whole.
        start_new_session=True,
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
