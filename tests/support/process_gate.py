"""Prevents tests without a matching marker from starting processes; used by tests/conftest.py.

It keeps `make test-fast` fast by mistake-proofing, not by force: Python raises an audit event for most ways to start a
process, and the function beneath `multiprocessing`'s others is wrapped here; a C library's own calls go unseen, and
what a module does while it is collected belongs to no test.
"""

import _posixsubprocess
import sys
from collections.abc import Collection
from typing import Any

import pytest

MARKERS = ("distributed", "packaging", "vllm", "layouts", "devices", "gpu", "npu")
"""Tests with one of these may start processes: the first says just that, the others are never in the fast set."""

EVENTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system")


class ProcessGate:
    """`refused` lists the attempts refused since the last `close`: product code may have caught the error."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self._test: str | None = None
        sys.addaudithook(self._on_event)  # stays for the lifetime of the interpreter; an open gate allows everything
        fork_exec = _posixsubprocess.fork_exec

        def checked_fork_exec(*arguments: Any) -> int:
            self._on_event("subprocess.Popen", (arguments[0],))
            return fork_exec(*arguments)

        _posixsubprocess.fork_exec = checked_fork_exec

    def close(self, test: str, markers: Collection[str]) -> None:
        """Marks the start of `test`, which may start processes if one of its markers allows that."""
        self.refused = []
        self._test = None if set(markers) & set(MARKERS) else test

    def open(self) -> None:
        """Allows everything, between tests."""
        self._test = None

    def require_none_refused(self) -> None:
        """Fails the test if it tried to start a process, even if the error was caught."""
        if self.refused:
            pytest.fail("\n".join(self.refused), pytrace=False)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._test is None or event not in EVENTS:
            return
        self.refused.append(
            f"{self._test} starts a process ({event} of {str(arguments)[:200]}) without saying so: mark it, or its "
            "file, with pytest.mark.distributed, which keeps it out of `make test-fast`"
        )
        raise RuntimeError(self.refused[-1])
