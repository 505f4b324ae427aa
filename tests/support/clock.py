"""A clock that a test moves by hand."""

from collections.abc import Callable

START_S = 1000.0
"""Not zero, which stands for "never" in places."""


class Clock:
    """Seconds that pass only by `sleep`, or where a test adds to `now_s`; what happens in a sleep is `during`."""

    def __init__(self, during: Callable[[], object] = lambda: None) -> None:
        self.now_s = START_S
        self._during = during

    def __call__(self) -> float:
        return self.now_s

    @property
    def passed_s(self) -> float:
        return self.now_s - START_S

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s
        self._during()
