"""Ends what takes too long in the worker of a synchronous reward; for `regex`, `math` and `reasoning_gym`."""

import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from async_rl.method.types import Prompt, Response

log = logging.getLogger(__name__)

REPEAT_S = 0.1
"""After the first time, the exception is raised again so often: whatever runs may have caught it."""


class TookTooLong(BaseException):
    """A limit was reached. No `Exception`: parsers and solvers catch those, and go on."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Ends its body, in the main thread, by `TookTooLong`; `re` looks for signals while it matches."""

    def end(signum: int, frame: FrameType | None) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, end)
    try:
        try:
            # A timer of 0 would never end it.
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), REPEAT_S)
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        # Again: a repetition may have come just before.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class SharedTime:
    """The time of a call for so many responses: each has an equal part of it, and of what those before it left."""

    def __init__(self, seconds: float, num_responses: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end_s = clock() + seconds
        self._num_left = num_responses

    def next_s(self) -> float:
        """Seconds for the next response; 0 if none are left."""
        share = max(self._end_s - self._clock(), 0.0) / max(self._num_left, 1)
        self._num_left -= 1
        return share


def scores_in_time(
    prompt: Prompt, responses: Sequence[Response], time: SharedTime, score: Callable[[Response], float], failing: str
) -> list[float]:
    """The score of each response; 0 for one that takes longer than its part of the time, with `failing` in the log."""
    rewards = []
    for number, response in enumerate(responses):
        limit_s = time.next_s()
        try:
            with time_limit(limit_s):
                reward = score(response)
            rewards.append(reward)
        except TookTooLong:
            rewards.append(0.0)
            log.warning("prompt %s, response %d: %s (%.3g s)", prompt.prompt_id, number, failing, limit_s)
    return rewards
