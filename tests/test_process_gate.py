"""A test that is not marked for it cannot start a process: whatever `make test-fast` runs, runs in one process."""

import asyncio
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.resource_tracker import ResourceTracker

import pytest

from tests.support.process_gate import ProcessGate

NOTHING = [sys.executable, "-c", ""]


def fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def start_resource_tracker() -> None:
    ResourceTracker().ensure_running()


STARTS: dict[str, Callable[[], object]] = {
    "subprocess": lambda: subprocess.run(NOTHING, check=True),
    "asyncio": lambda: asyncio.run(asyncio.create_subprocess_exec(*NOTHING)),
    "fork": fork,
    "posix_spawn": lambda: os.posix_spawn(sys.executable, NOTHING, os.environ),
    "system": lambda: os.system("true"),
    "multiprocessing": multiprocessing.get_context("spawn").Process(target=print).start,
    "resource_tracker": start_resource_tracker,
}


@pytest.mark.parametrize("way", STARTS)
def test_an_unmarked_test_that_starts_a_process_fails_even_if_the_error_is_caught(
    process_gate: ProcessGate, way: str
) -> None:
    with pytest.raises(RuntimeError, match=r"mark it, or its file, with pytest.mark.distributed"):
        STARTS[way]()
    with pytest.raises(pytest.fail.Exception, match=f"{way}.* starts a process"):
        process_gate.require_none_refused()
    process_gate.refused.clear()


@pytest.mark.distributed
def test_a_marked_test_may_start_processes(process_gate: ProcessGate) -> None:
    STARTS["subprocess"]()
    process_gate.require_none_refused()
