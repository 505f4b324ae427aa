"""Runs coroutines on a clock that jumps to the next timer as soon as nothing else is left to do.

For what depends on time alone: hours pass at once, and how busy the machine is changes nothing. The coroutines may wait
for timers and for each other; what a socket, a thread or a process brings about would come too late.
"""

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")

START_S = 1000.0
"""Not zero, which stands for "never" in places."""


def run(scenario: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`; meanwhile `time.monotonic`, from which the loop has its time, is a clock that jumps.

    Raises:
        AssertionError: the scenario waits for something that no timer brings about: it would hang.
    """
    selector = _JumpingSelector()
    with (
        mock.patch.object(time, "monotonic", lambda: selector.now_s),
        asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner,
    ):
        return runner.run(scenario)


class _JumpingSelector(selectors.DefaultSelector):
    """Lets the time pass that a selector would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = START_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        assert ready or timeout is not None, "nothing is left that could end what the scenario waits for"
        if not ready:
            self.now_s += max(0.0, timeout or 0.0)
        return ready
