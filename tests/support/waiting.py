"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable

LIMIT_S = 60.0
"""A minute is a hang, however busy the machine is."""


def wait_for(holds: Callable[[], object], timeout_s: float = LIMIT_S, said: Callable[[], object] = str) -> None:
    """Returns once the condition holds; fails, with what is `said` then, where it does not within the limit."""
    begun = time.monotonic()
    while not holds():
        waited_s = time.monotonic() - begun
        assert waited_s < timeout_s, f"it did not come to hold within {timeout_s:g} s\n{said()}"
        # To ask may be work for this machine: seldom, after a while.
        time.sleep(min(0.01 + waited_s / 20, 0.2))
