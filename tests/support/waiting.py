"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable

LIMIT_S = 60.0
"""A minute is a hang, however busy the machine is."""


def wait_for(holds: Callable[[], object], timeout_s: float = LIMIT_S) -> None:
    """Returns once the condition holds; fails where it does not within the limit."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"it did not come to hold within {timeout_s:g} s"
        time.sleep(0.01)
