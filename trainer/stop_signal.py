"""SIGTERM to a training rank: the first one requests an orderly end of the run, the second ends the process at once.

Imports nothing heavy: `trainer.__main__` installs it before the config is validated.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

REPEAT_S = 2.0
"""Signals within this time count as one: launchers signal both a process and its process group."""


class StopSignal:
    """Whether this process received SIGTERM. While `deferred`, the first one is only recorded: `Shutdown` acts on it.

    Args:
        on_end: called before the first one ends this process.
    """

    def __init__(self, on_end: Callable[[], object] = lambda: None) -> None:
        self.deferred = False
        self._on_end = on_end
        self._is_loading = False
        self._requested_s: float | None = None

    @property
    def is_requested(self) -> bool:
        """Whether a SIGTERM was received."""
        return self._requested_s is not None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """In its body, which imports, the signal ends this process without an exception: an import may swallow that."""
        self._is_loading = True
        try:
            yield
        finally:
            self._is_loading = False

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self.handle)

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Handles the signal; if nothing has to be saved, as an exception, so that everything opened is closed."""
        now = time.monotonic()
        if self._requested_s is None:
            self._requested_s = now
            if not self.deferred:
                # At once: an error of another rank that follows from this end must not be reported before.
                self._on_end()
                if self._is_loading:
                    os._exit(128 + signum)
                sys.exit(128 + signum)
        elif now - self._requested_s > REPEAT_S:
            os._exit(128 + signum)
