"""A Python interpreter that keeps its names from call to call, as a notebook does: the tool of an agent."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import sys

from async_rl.parts.sandbox.inside.confinement import confine, receive, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any


def main(connection: int, request: dict[str, Any]) -> None:
    confine(request)
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    signal.signal(signal.SIGALRM, _too_long)
    process = os.getpid()
    while True:
        try:
            code = receive(connection).decode("utf-8", "replace")
        except EOFError:
            os._exit(0)
        answer = _call(code, names, request["call_s"], request["answer_bytes"])
        if os.getpid() != process:
            # The code has forked: calls are answered once.
            os._exit(0)
        send(connection, answer)


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("the call took too long")


def _call(code: str, names: dict[str, Any], call_s: float, answer_bytes: int) -> bytes:
    """Runs the code; what it printed, then the value of its last line or its traceback."""
    output = os.open(".output", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    os.unlink(".output")
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        signal.setitimer(signal.ITIMER_REAL, call_s)
        _run(code, names)
    except BaseException as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _show(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    for stream in (sys.stdout, sys.stderr):
        # The code may have closed or replaced it.
        with contextlib.suppress(Exception):
            stream.flush()
    size = os.fstat(output).st_size
    text = os.pread(output, answer_bytes, 0)
    if size > answer_bytes:
        text += b"\n[%d more bytes]" % (size - answer_bytes)
    os.close(output)
    return text


def _run(code: str, names: dict[str, Any]) -> None:
    tree = ast.parse(code, "<call>")
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, "<call>", "exec"), names)
        return
    exec(compile(ast.Module(tree.body[:-1], []), "<call>", "exec"), names)
    value = eval(compile(ast.Expression(last.value), "<call>", "eval"), names)
    if value is not None:
        print(repr(value))


def _show(error: BaseException) -> None:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != "<call>":
        trace = trace.tb_next
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    sys.excepthook(type(error), error.with_traceback(trace), trace)
