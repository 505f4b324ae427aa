"""Inference instances in separate processes, for benchmarks and tests."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

READY = re.compile(r"ready at (http://\S+)")
START_TIMEOUT_S = 180.0
"""Five seconds on a quiet machine; more than a minute was seen on a busy one."""
END_TIMEOUT_S = 10.0


def launch(
    *arguments: str, env: Mapping[str, str] | None = None, python: str = sys.executable
) -> "subprocess.Popen[str]":
    """Starts `python -m inference_service` with these arguments; stdout and stderr are one pipe."""
    return subprocess.Popen(
        [python, "-m", "inference_service", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )


def wait_for_url(process: "subprocess.Popen[str]", timeout_s: float = START_TIMEOUT_S) -> str:
    """The URL of an instance that `launch` started, once it is ready; fails with its output if it ends first."""
    lines: list[str] = []
    deadline = threading.Timer(timeout_s, process.kill)
    deadline.start()
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if found := READY.search(line):
            deadline.cancel()
            # The pipe has to be drained: a full pipe would block the server.
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return found[1]
    deadline.cancel()
    raise AssertionError(f"the server ended with {process.wait()}:\n{''.join(lines)}")


@contextmanager
def running_instance(model: Path, *arguments: str, core: int | None = None) -> Iterator[str]:
    """An instance of `model` at a free port, pinned to one core if one is given; yields its URL when it is ready."""
    process = launch("--model", str(model), "--port", "0", *arguments)
    try:
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        yield wait_for_url(process)
    finally:
        process.terminate()
        process.wait(END_TIMEOUT_S)
