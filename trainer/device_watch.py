"""Notices that the device of a training rank that is alone no longer answers, and ends the rank then.

Whoever waits for a kernel that never ends waits for ever. Among several ranks the collectives of the others time out;
nobody waits for a sole one. So a thread looks at what the main thread has its device do, and asks an event behind that
whether the device has done it: the host waits no more often than without it. As in `lifeline`, time counts only while
this process runs, and code that holds Python's lock keeps the thread from looking.
"""

import faulthandler
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeVar, cast

import torch

from async_rl.errors import RankLost
from trainer.lifeline import Silence
from trainer.process_end import end_now

T = TypeVar("T")

LOST_LIMITS = 30
"""Work may take so many times `trainer.lost_after_s`, by default a quarter of an hour: first passes compile kernels."""

LOOKS_PER_LIMIT = 12


class _Work(NamedTuple):
    number: int
    what: str
    end: torch.Event | None
    """Behind all of it on the device's stream; None while more may follow."""


class DeviceWatch:
    """Looks at the work of one rank's device; does nothing on a CPU, where long work is usual, or with several ranks.

    Args:
        lost_after_s: `trainer.lost_after_s`.
        on_hang: called once, in a thread, with the error: it must end the process.
    """

    def __init__(
        self,
        device: torch.device,
        num_ranks: int,
        lost_after_s: float,
        on_hang: Callable[[RankLost], object] = end_now,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device = device
        self._limit_s = LOST_LIMITS * lost_after_s
        self._on_hang = on_hang
        self._is_on = device.type != "cpu" and num_ranks == 1
        self._numbers = itertools.count()
        self._work: _Work | None = None
        interval_s = self._limit_s / LOOKS_PER_LIMIT
        self._silence = Silence(2 * interval_s, clock)
        if self._is_on:
            words = (weakref.ref(self), interval_s)
            threading.Thread(target=_look_regularly, args=words, name="async-rl-device-watch", daemon=True).start()

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """The device gets `what` to do in the body, which need not wait for it."""
        if not self._is_on:
            yield
            return
        self._work = _Work(next(self._numbers), what, None)
        try:
            yield
            end = torch.Event(self._device)
            end.record()
        except BaseException:
            self._work = None
            raise
        self._work = _Work(next(self._numbers), what, end)

    def each(self, parts: Iterable[T]) -> Iterator[T]:
        """Parts of the work of `during`, each of which may take as long as all."""
        for part in parts:
            if self._work is not None:
                self._work = self._work._replace(number=next(self._numbers))
            yield part

    def making(self, what: str, parts: Iterable[T]) -> Iterator[T]:
        """Parts that are work to make: how long whoever gets one keeps it, such as a slow receiver, does not count."""
        end, iterator = object(), iter(parts)
        while True:
            with self.during(what):
                part = next(iterator, end)
            if part is end:
                return
            yield cast(T, part)

    def look(self) -> RankLost | None:
        """Called regularly, by one thread; the error once work has gone on for too long."""
        work = self._work
        self._silence.note_time()
        if work is None or _is_done(work):
            # The next work begins anew.
            self._silence.note_count(0, -1 - next(self._numbers))
            return None
        self._silence.note_count(0, work.number)
        if not self._silence.longer_than(self._limit_s):
            return None
        limit = f"for {self._limit_s:g} s ({LOST_LIMITS} times trainer.lost_after_s)"
        return RankLost(
            f"{work.what} has not finished on {self._device} {limit}: a kernel hangs; start the run again with "
            "run.resume = true"
        )

    def end(self, error: RankLost) -> None:
        """Shows what all threads are doing, and ends the process."""
        # Where that is closed, or no file, the error alone is shown.
        with suppress(OSError, ValueError, RuntimeError):
            faulthandler.dump_traceback(sys.stderr)
        self._on_hang(error)


def _look_regularly(reference: "weakref.ref[DeviceWatch]", interval_s: float) -> None:
    """Until the watch is gone, or work has gone on for too long."""
    while True:
        time.sleep(interval_s)
        if (watch := reference()) is None:
            return
        if (error := watch.look()) is not None:
            watch.end(error)
            return
        del watch


def _is_done(work: _Work) -> bool:
    if work.end is None:
        return False
    try:
        return work.end.query()
    except RuntimeError:
        # The device is lost: the main thread's next call to it says so.
        return True
