"""The broadcast of gloo as a chain: each member passes on to the next what it has received.

A link between hosts so carries the bytes once each way, however many members there are; gloo's own broadcast is a tree,
in which the sender's link carries them log2(n + 1) times. A message passes in pieces, so the chain takes as long as one
link, and a piece more for each member. NCCL's broadcast is such a ring already (its src/graph/tuning.cc has no other
algorithm for it); HCCL chooses among several.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

PIECE_BYTES = 4 * 2**20
"""Each member delays the next by so much: 34 ms at 1 Gbit/s. A piece costs a member 0.2 ms of processor time or less,
beside the 1.4 ms of its bytes."""

TAG, TAG_OF_NONE = 0, 1
"""Of all pieces, and of what is never sent."""

LEAST_S = 0.001
"""gloo takes a timeout of 0 for none."""


class Chain(dist.ProcessGroupGloo):
    """A process group whose broadcasts pass from rank 0 to 1, from 1 to 2, and so on.

    The work of one has ended when this rank has received all of it, and the next rank has received it from here.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, options: Any) -> None:
        super().__init__(store, rank, world_size, options)
        self._timeout_s: float = options._timeout.total_seconds()
        self._arrivals: SimpleQueue[_Arrival | None] = SimpleQueue()
        if 0 < rank < world_size - 1:
            # Whoever waits for broadcasts also copies and hashes, and must not hold up the ranks behind.
            name = "async-rl-collective"
            threading.Thread(target=_pass_all_on, args=(self._arrivals,), name=name, daemon=True).start()

    def broadcast(self, tensors: list[torch.Tensor], _: Any) -> "_Passage":
        """Of one tensor, uint8 [num_bytes], on the CPU."""
        (data,) = tensors
        # One receiver passes nothing on.
        piece_bytes = PIECE_BYTES if self.size() > 2 else data.numel()
        pieces = list(data.split(piece_bytes)) if data.numel() else []
        rank = self.rank()
        if rank == 0:
            sends = [self.send([piece], 1, TAG) for piece in pieces]  # type: ignore[attr-defined]
            return _Passage(lambda _: sends, self._timeout_s)
        receives = [self.recv([piece], rank - 1, TAG) for piece in pieces]  # type: ignore[attr-defined]
        if rank == self.size() - 1:
            return _Passage(lambda _: receives, self._timeout_s)
        arrival = _Arrival(self, pieces, receives, self._timeout_s, Future())
        self._arrivals.put(arrival)
        return _Passage(arrival.sends.result, self._timeout_s)

    def abort(self) -> None:
        """Closes all connections: nothing is written to buffers afterwards. gloo has no call for it, but does so when a
        wait ends by its time limit; it does not wake a wait for what is just passing, which ends by its own."""
        neighbour = self.rank() - 1 if self.rank() else 1
        with suppress(RuntimeError):
            never = self.recv([torch.empty(1, dtype=torch.uint8)], neighbour, TAG_OF_NONE)  # type: ignore[attr-defined]
            never.wait(timedelta(seconds=LEAST_S))

    def shutdown(self) -> None:
        super().shutdown()
        self._arrivals.put(None)


@dataclass(frozen=True, slots=True)
class _Passage:
    """The work of a broadcast."""

    last_works: Callable[[float | None], list[Any]]
    """Waits until all pieces are being sent, at most so many seconds; where the chain ends, it is the work of receiving
    them."""
    timeout_s: float

    def wait(self, timeout_s: float | None = None) -> None:
        """
        Raises:
            RuntimeError: it has failed, or was not done within the time limit; its own, unless another is given.
            TimeoutError: the same.
        """
        _wait(self.last_works(timeout_s), self.timeout_s if timeout_s is None else timeout_s)


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A message that is to be passed on, and the work of receiving each of its pieces."""

    group: Any
    pieces: list[torch.Tensor]
    receives: list[Any]
    timeout_s: float
    sends: "Future[list[Any]]"

    def pass_on(self) -> None:
        to, sends = self.group.rank() + 1, []
        unsent = iter(self.pieces)
        try:
            _wait(self.receives, self.timeout_s, lambda: sends.append(self.group.send([next(unsent)], to, TAG)))
            self.sends.set_result(sends)
        except RuntimeError as error:
            sends.clear()
            self.sends.set_exception(RuntimeError(str(error)))


def _wait(works: list[Any], timeout_s: float, after_each: Callable[[], object] = lambda: None) -> None:
    """Waits for one after the other, at most `timeout_s` for all, and forgets them: work that anything refers to, such
    as the traceback of an error, keeps the connections of a closed group open."""
    deadline = time.monotonic() + timeout_s
    try:
        while works:
            works.pop(0).wait(timedelta(seconds=max(deadline - time.monotonic(), LEAST_S)))
            after_each()
    finally:
        works.clear()


def _pass_all_on(arrivals: "SimpleQueue[_Arrival | None]") -> None:
    while _pass_next_on(arrivals):
        pass


def _pass_next_on(arrivals: "SimpleQueue[_Arrival | None]") -> bool:
    """Whether there was one; in a function of its own, which keeps no name of it while it waits for the next."""
    arrival = arrivals.get()
    if arrival is not None:
        arrival.pass_on()
    return arrival is not None
