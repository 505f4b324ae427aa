"""SIGTERM to a training rank: at first it asks the run to end in order, the second one ends the process at once.

Imports nothing heavy: `trainer.__main__` has it before it knows whether its config is good.
"""

import os
import signal
import sys
import time
from types import FrameType

REPEAT_S = 2.0
"""Signals so close together are one: launchers send theirs to a process and to its group."""


class StopSignal:
    """What this process was told. While `deferred`, the first SIGTERM is only noted: `Ending` acts on it."""

    def __init__(self) -> None:
        self.deferred = False
        self._told_s: float | None = None

    @property
    def told(self) -> bool:
        """Whether a SIGTERM has come."""
        return self._told_s is not None

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self.note)

    def note(self, signum: int, frame: FrameType | None) -> None:
        """Handles the signal; where nothing is to be saved, as an exception, so that all that was opened is closed."""
        now = time.monotonic()
        if self._told_s is None:
            self._told_s = now
            if not self.deferred:
                sys.exit(128 + signum)
        elif now - self._told_s > REPEAT_S:
            os._exit(128 + signum)
