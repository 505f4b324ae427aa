"""Runs one Python program several times, each time in a process of its own and with another standard input."""

from __future__ import annotations

import atexit
import os
import resource
import signal
import sys

from async_rl.parts.sandbox.inside.confinement import as_stdin, confine, receive, run_as_main, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any


def main(connection: int, request: dict[str, Any]) -> None:
    """Reads an input after the other; answers with a byte, 1 for exit code 0 and else 0, and what was printed."""
    confine(request)
    path = os.path.join(os.getcwd(), "program.py")
    program: str | CodeType = request["source"]
    try:
        program = compile(request["source"], path, "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass  # It is an error of each run.
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
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    as_stdin(stdin)
    os.dup2(output, 1)
    # What a program says there is not judged, however much it is.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    code = run_as_main(program, path)
    try:
        _finish()
    finally:
        os._exit(code)


def _finish() -> None:
    """What Python does before it ends, but for taking itself apart: in a forked process that copies all its memory."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    # The program's own files write what they still hold.
    vars(sys.modules["__main__"]).clear()


def _end_the_rest() -> None:
    """Whatever the program started: it may still run."""
    try:
        os.kill(-1, signal.SIGKILL)
        while True:
            os.waitpid(-1, 0)
    except (ProcessLookupError, PermissionError, ChildProcessError):
        pass
