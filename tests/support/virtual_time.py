"""Runs coroutines on a clock that jumps to the next timer as soon as nothing else is left to do.

For tests whose subject is a time limit: hours pass at once, and how busy the machine is changes nothing. The coroutines
may wait for timers and for each other; what a socket, a thread or a process brings about would come too late.
"""

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar
from unittest import mock

from tests.support.clock import Clock

T = TypeVar("T")


def run(scenario: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`; meanwhile `time.monotonic`, from which the loop has its time, is a clock that jumps.

    Raises:
        AssertionError: the scenario waits for something that no timer brings about: it would hang.
    """
    clock = Clock()
    with (
        mock.patch.object(time, "monotonic", clock),
        asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(_JumpingSelector(clock))) as runner,
    ):
        return runner.run(scenario)


class _JumpingSelector(selectors.DefaultSelector):
    """Lets the time pass that a selector would wait."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        assert ready or timeout is not None, "nothing is left that could end what the scenario waits for"
        if not ready:
            self._clock.sleep(max(0.0, timeout or 0.0))
        return ready
