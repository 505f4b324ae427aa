"""Weights between hosts without devices: each member of a weight group passes on what it receives to the next one.

A link between hosts so carries the bytes once each way, however many members there are; a tree's sender, as gloo's
broadcast has it, sends log2(n + 1) copies. A message passes in pieces, so the chain takes as long as one link, and a
piece more for each member. NCCL's broadcast is such a ring already (its src/graph/tuning.cc has no other algorithm for
it); HCCL chooses among several.

Members are connected by sockets of their own (`links.py`): the end of one is noticed by its neighbours at once, and a
piece is hashed as it passes, while the processor has it in its cache.
"""

import socket
import threading
import time
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch
import xxhash

from async_rl.shared.weights.links import connect
from async_rl.shared.weights.store import ENDED, RendezvousStore
from async_rl.shared.weights.store_wire import shut

PIECE_BYTES = 2**20
"""Each member delays the next by so much: 8 ms at 1 Gbit/s. Smaller ones cost more in system calls than they save."""

LOOK_S = 0.05
"""How often one that waits looks whether the sender has ended the rendezvous."""

LEAST_S = 0.001
"""A socket takes a timeout of 0 for none."""

STOP_TIMEOUT_S = 10.0
"""A thread whose connections are closed needs no time."""

ALL_HERE = b"a"
"""Passed back from the last member: the end of a stream has arrived at all."""


@dataclass(eq=False, slots=True)
class Passage:
    """The work of a broadcast, or of the end of a stream."""

    data: torch.Tensor | None
    is_hashed: bool = False
    digest: bytes = b""
    """xxh3-128 of a message that is hashed, once it has passed."""
    problem: str | None = None
    ended: threading.Event = field(default_factory=threading.Event)


class Chain:
    """The collectives of one rank, as `collectives.Collectives`; the messages of a stream are followed by its end."""

    def __init__(self, store: RendezvousStore, rank: int, world_size: int, timeout_s: float) -> None:
        """Returns when all members have connected and proven that they were invited.

        Raises:
            NotInvited, PublishError: as `links.connect`.
        """
        self.device = torch.device("cpu")
        self._rank = rank
        self._timeout_s = timeout_s
        self._has_ended = store.has_ended
        self._before, self._after = connect(store, rank, world_size, timeout_s)
        self._is_open = True
        self._passages: SimpleQueue[Passage | None] = SimpleQueue()
        # Whoever waits for messages also copies them, and must not hold up the ranks behind.
        self._thread = threading.Thread(target=self._pass_all, name="async-rl-chain", daemon=True)
        self._thread.start()

    def broadcast(self, data: torch.Tensor, is_hashed: bool = False) -> Passage:
        """Begins to pass `data`, uint8 [num_bytes], from rank 0 to all, after what was begun before.

        Raises:
            RuntimeError: the group is closed.
        """
        return self._begin(Passage(data, is_hashed))

    def end(self) -> Passage:
        """Begins the end of a stream: the wait for it lasts until all members have all messages.

        Raises:
            RuntimeError: the group is closed.
        """
        return self._begin(Passage(None))

    def wait(self, passage: Passage) -> None:
        """Returns when it has passed this rank: what rank 0 sent has been written to its connection.

        Raises:
            RuntimeError: a connection has ended, or the message did not pass within the timeout.
        """
        while not passage.ended.wait(LOOK_S):
            if self._has_ended():
                self.close()
                raise RuntimeError(ENDED)
        if passage.problem is not None:
            raise RuntimeError(passage.problem)

    def close(self) -> None:
        """Closes the connections: nothing is written to buffers afterwards; a second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        ends = [each for each in (self._before, self._after) if each is not None]
        for each in ends:
            shut(each)
        self._passages.put(None)
        self._thread.join(STOP_TIMEOUT_S)
        for each in ends:
            each.close()

    def _begin(self, passage: Passage) -> Passage:
        if not self._is_open:
            raise RuntimeError("the group is closed")
        self._passages.put(passage)
        return passage

    def _pass_all(self) -> None:
        problem = None
        while (passage := self._passages.get()) is not None:
            if problem is None:
                try:
                    self._pass(passage, time.monotonic() + self._timeout_s)
                except Exception as error:
                    # Whoever waits for it would wait for ever.
                    problem = str(error)
            passage.problem = problem
            passage.ended.set()
            # Without a name, which would keep it in memory while the next one is awaited.
            del passage

    def _pass(self, passage: Passage, deadline: float) -> None:
        if passage.data is None:
            here = memoryview(bytearray(ALL_HERE))
            if self._after is not None:
                self._receive(self._after, self._rank + 1, here, deadline)
            if self._before is not None:
                self._send(self._before, self._rank - 1, here, deadline)
            return
        data = passage.data.numpy().data
        of_message = xxhash.xxh3_128()
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            if self._before is not None:
                self._receive(self._before, self._rank - 1, piece, deadline)
            if self._after is not None:
                self._send(self._after, self._rank + 1, piece, deadline)
            if passage.is_hashed:
                of_message.update(piece)
        passage.digest = of_message.digest()

    def _receive(self, connection: socket.socket, rank: int, piece: memoryview, deadline: float) -> None:
        try:
            while piece:
                connection.settimeout(max(deadline - time.monotonic(), LEAST_S))
                if not (num_bytes := connection.recv_into(piece)):
                    raise ConnectionError("it has ended")
                piece = piece[num_bytes:]
        except OSError as error:
            raise OSError(f"the connection from rank {rank}: {error}") from error

    def _send(self, connection: socket.socket, rank: int, piece: memoryview, deadline: float) -> None:
        try:
            connection.settimeout(max(deadline - time.monotonic(), LEAST_S))
            connection.sendall(piece)
        except OSError as error:
            raise OSError(f"the connection to rank {rank}: {error}") from error
