"""Runs a test in a process of its own that has an emulated NPU: forks of one interpreter, which has imported torch.

`python -m tests.support.devices.emulated.process` is that interpreter: it reads `FILE FUNCTION` per line, and answers
each with one line of JSON, null or what was raised.
"""

import atexit
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.devices.emulated.build import lacking
from tests.support.devices.emulated.environment import emulated_environment

IN_PROCESS = "EMULATED_NPU_PROCESS"


def on_emulated_npu(test: Callable[[], None]) -> Callable[[], None]:
    """A test without arguments that runs in a fork, in which npu:0 to npu:7 are there; only queued copies are late."""
    if IN_PROCESS in os.environ:
        return test

    @functools.wraps(test)
    def run() -> None:
        if (reason := lacking()) is not None:
            pytest.skip(reason)
        failure = _ask(f"{test.__code__.co_filename} {test.__name__}")
        if failure is not None:
            pytest.fail(failure, pytrace=False)

    return run


def _ask(question: str) -> str | None:
    process = _interpreter()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(question + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    assert answer, "the interpreter with the emulated NPU has ended"
    failure: str | None = json.loads(answer)
    return failure


@functools.cache
def _interpreter() -> "subprocess.Popen[str]":
    folder = tempfile.TemporaryDirectory(prefix="emulated-npu-")
    environment = emulated_environment(Path(folder.name), late="always") | {IN_PROCESS: "1"}
    del environment["EMULATED_NPU_RECORDS"]
    process = subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )

    def end() -> None:
        process.communicate()
        folder.cleanup()

    atexit.register(end)
    return process


def _serve() -> None:
    sys.stdout.flush()
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            _answer(*line.split())
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status != 0:
            print(json.dumps(f"it ended with {status}"), flush=True)


def _answer(file: str, name: str) -> None:
    spec = importlib.util.spec_from_file_location("emulated_tests", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    answer: Any = None
    try:
        getattr(module, name)()
    except BaseException:
        answer = traceback.format_exc()
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    import torch  # noqa: F401  # imported once for all

    _serve()
