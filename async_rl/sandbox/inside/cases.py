"""Runs one Python program several times, each time in a process of its own and with another standard input."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys

from async_rl.sandbox.inside.confinement import as_stdin, confine, receive, run_as_main, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any


def main(connection: int, request: dict[str, Any]) -> None:
    """Reads an input after the other; answers with a byte, 1 for exit code 0 and else 0, and what was printed."""
    confine(request)
    path = os.path.join(os.getcwd(), "program.py")
    program: str | CodeType = request["source"]
    # What does not compile is an error of each run.
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        program = compile(request["source"], path, "exec")
    while True:
        try:
            stdin = receive(connection)
        except EOFError:
            os._exit(0)
        output = os.open(".stdout", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        os.unlink(".stdout")
        child = os.fork()
        if child == 0:
            os.close(connection)
            _run(program, path, stdin, output, request["cpu_s"])
        _, status = os.waitpid(child, 0)
        _end_the_rest()
        size = min(os.fstat(output).st_size, request["output_bytes"] + 1)
        send(connection, bytes([status == 0]) + os.pread(output, size, 0))
        os.close(output)


def _run(program: str | CodeType, path: str, stdin: bytes, output: int, cpu_s: int) -> None:
    """Ends this process as Python ends one: with the program's own handlers of its exit."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    as_stdin(stdin)
    os.dup2(output, 1)
    # What a program says there is not judged, however much it is.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.exit(run_as_main(program, path))


def _end_the_rest() -> None:
    """Whatever the program started: it may still run."""
    try:
        os.kill(-1, signal.SIGKILL)
        while True:
            os.waitpid(-1, 0)
    except (ProcessLookupError, PermissionError, ChildProcessError):
        pass
