"""Notices that another training rank is gone or stopped, or that this one is cut off, and ends this rank then.

A collective waits for hours, since the slowest rollout of a batch may take that long, and a stopped process or a cut
link closes no connection. So every rank counts up a key in the process group's store, over a connection of its own, in
a thread. The main rank reads all counts and tells the others who is lost; they read its count. A second thread judges
by what the first one has found, since a request to the store may itself never return.

Silence counts only while this process runs: where all ranks were stopped together, they go on together. A thread beats
while the main thread waits in a collective or computes in torch, which releases Python's lock; code that holds the lock
for `trainer.lost_after_s` looks like a stopped process.
"""

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from async_rl.errors import RankLost
from trainer.parallel import Parallel

log = logging.getLogger(__name__)

BEATS_PER_LIMIT = 9
BEATS_TO_LOSE = 6
"""A rank that misses so many beats in a row is lost; in the time of the others all ranks learn of it."""

BEATS_TO_REPORT = 2.5
LOST = "lost"
CLOSED = 2**40
"""Added to the count of a rank that ends: it is not missed any more."""

CLOSE_TIMEOUT_S = 5.0


class Silence:
    """How long each rank's count has not changed, in seconds that this process ran; pure, apart from its clock.

    Args:
        max_step_s: the longest time between two calls of `note_time` that counts: more means that this process itself
            was stopped.
    """

    def __init__(self, max_step_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_step_s = max_step_s
        self._clock = clock
        self._last_s = clock()
        self._counts: dict[int, int] = {}
        self._silent_s: dict[int, float] = {}

    def note_time(self) -> None:
        """Lets the time pass for all ranks."""
        now = self._clock()
        step_s, self._last_s = min(now - self._last_s, self._max_step_s), now
        self._silent_s = {rank: silent_s + step_s for rank, silent_s in self._silent_s.items()}

    def note_count(self, rank: int, count: int) -> None:
        """What was read for a rank; a rank is missed from its first call on."""
        if self._counts.get(rank) != count:
            self._counts[rank], self._silent_s[rank] = count, 0.0

    def longer_than(self, limit_s: float) -> list[int]:
        """The ranks that were silent for longer, without those that have closed."""
        return [
            rank
            for rank, silent_s in sorted(self._silent_s.items())
            if silent_s > limit_s and self._counts[rank] < CLOSED
        ]


class Lifeline:
    """One rank's beat and its watch over the others, from the constructor to `close`; nothing with a single rank.

    All ranks create it at the same time.

    Args:
        lost_after_s: `trainer.lost_after_s`; all ranks know of a lost one by then.
        on_loss: called once, in a thread, with the error: it must end the process.
    """

    def __init__(self, parallel: Parallel, lost_after_s: float, on_loss: Callable[[RankLost], object]) -> None:
        self._rank, self._num_ranks = parallel.rank, parallel.num_ranks
        self._interval_s = lost_after_s / BEATS_PER_LIMIT
        self._on_loss = on_loss
        self._closing = threading.Event()
        self._lock = threading.Lock()
        # Of the other ranks that are read and, under this rank's own number, of the store.
        self._silence = Silence(max_step_s=2 * self._interval_s)
        self._store_error = ""
        self._reported = ""
        self._thread: threading.Thread | None = None
        if self._num_ranks > 1:
            self._store = _new_connection(f"async-rl/lifeline/{parallel.broadcast_json(secrets.token_hex(4))}")
            self._silence.note_count(self._rank, 0)
            self._thread = threading.Thread(target=self._beat, name="async-rl-lifeline", daemon=True)
            self._thread.start()
            threading.Thread(target=self._judge, name="async-rl-lifeline-judge", daemon=True).start()

    def close(self) -> None:
        """Ends the watch; the other ranks do not miss this one from now on. Call it before the process group ends."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _beat(self) -> None:
        """Counts up and reads the others, until `close`."""
        beats = itertools.count(1)
        try:
            while not self._closing.wait(self._interval_s):
                self._exchange(next(beats))
            self._store.add(str(self._rank), CLOSED)
        except RuntimeError as error:
            # torch's error of a lost connection: the host of the store has ended. Silence follows from it.
            log.debug("the store of the training ranks is gone: %s", error)
            self._store_error = f" ({error})"

    def _exchange(self, beat: int) -> None:
        self._store.add(str(self._rank), 1)
        read = [rank for rank in range(self._num_ranks) if rank != self._rank] if self._rank == 0 else [0]
        counts = {rank: self._store.add(str(rank), 0) for rank in read}
        if self._rank == 0 and self._reported:
            self._store.set(LOST, self._reported)
        elif self._rank != 0 and self._store.check([LOST]):
            self._reported = self._store.get(LOST).decode()
        with self._lock:
            self._silence.note_count(self._rank, beat)
            for rank, count in counts.items():
                self._silence.note_count(rank, count)

    def _judge(self) -> None:
        while not self._closing.wait(self._interval_s / 4):
            with self._lock:
                self._silence.note_time()
                silent = self._silence.longer_than(BEATS_TO_LOSE * self._interval_s)
            if silent and not self._reported:
                self._reported = self._description(silent)
                if self._rank == 0:
                    log.error("%s", self._reported)
                    self._closing.wait(BEATS_TO_REPORT * self._interval_s)
            if self._reported and not self._closing.is_set():
                self._on_loss(RankLost(f"{self._reported}; start the run again with run.resume = true"))
                return

    def _description(self, silent: list[int]) -> str:
        limit = f"for {BEATS_TO_LOSE * self._interval_s:.0f} s (trainer.lost_after_s = "
        limit += f"{BEATS_PER_LIMIT * self._interval_s:g})"
        if self._rank in silent:
            return (
                f"training rank {self._rank} has not reached the store of the training ranks {limit}: the network to "
                f"the host of rank 0 is cut, or that host is gone{self._store_error}"
            )
        names = ", ".join(map(str, silent))
        return (
            f"nothing was heard of training rank {names} {limit}: its process is stopped, or its host or the network "
            "to it is gone"
        )


def _new_connection(prefix: str) -> dist.Store:
    """The process group's store over a connection of its own: the group's is in use by whoever waits for a key."""
    store = _get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    assert isinstance(store, dist.TCPStore), "torchrun's ranks meet at a TCPStore"
    own = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=timedelta(hours=1))
    return dist.PrefixStore(prefix, own)
