"""Bounds on the connections of our servers: strangers who connect and say nothing take no descriptors from others.

Without bounds they take all descriptors of the process. asyncio then logs each failed accept with its traceback, a
million lines a minute, and whatever else the process opens fails. `bounded_http.py` bounds servers of uvicorn,
`bounded_site.py` those of aiohttp, which instances do not load.
"""

import asyncio
import heapq
import resource
import time
from collections.abc import Collection
from typing import Protocol

SILENCE_S = 10.0
"""From a connection, an answer, or the last bytes of a request that is not complete, to its end."""

CHECK_S = 1.0

GRACE_S = 1.0
"""So long a new connection may be silent: its first request is on the way, also where hundreds come at once."""

SHARE = 4
"""Connections of a server that wait for their peer take this part of the process's descriptors, twice as many where
they come at once. No connection gets one of the last part: these are for the process's own files and clients."""

MOST = 8192

AT_ONCE = 64
"""This part of the connections that may wait ends together."""

ACCEPTS = 8
"""Connections taken in one turn of the loop: too many are noticed, and ended, in the turns between."""

BACKLOG = 4096
"""Further ones wait: all agents of a batch may connect at once."""


class BoundedConnection(Protocol):
    transport: asyncio.Transport
    waits_since_s: float
    """`time.monotonic()` of its beginning, its last bytes, or the end of our last answer, whichever came last."""

    @property
    def waits(self) -> bool:
        """Whether it is the peer's turn: no request is complete and unanswered."""
        ...


def max_waiting() -> int:
    """Connections of one server that wait for their peer, by this process's limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else max(16, min(MOST, soft // SHARE))


def first_reserved() -> float:
    """The first descriptor that no connection gets: the system gives the lowest free one, so those before are taken."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return float("inf") if soft == resource.RLIM_INFINITY else soft - soft // SHARE


def make_room(newest: BoundedConnection, of_server: Collection[BoundedConnection]) -> None:
    """If too many wait for their peer, those end that do so for the longest time.

    These are without a complete request: silent, half sent, or kept alive after a response. One whose request is being
    answered is never ended. The newest ends where there is no descriptor for it.

    Args:
        of_server: all connections of its server, and the newest.
    """
    if newest.transport.get_extra_info("socket").fileno() >= first_reserved():
        newest.transport.abort()
    most = max_waiting()
    if len(of_server) <= most:
        return
    # Aborted ones are among them until the loop has told them so.
    waiting = [each for each in of_server if each.waits and not each.transport.is_closing()]
    if len(waiting) > most:
        # Two for one, so that they become less; and several, since looking for them takes a while.
        for each in heapq.nsmallest(2 + most // AT_ONCE, waiting, key=lambda each: each.waits_since_s):
            if len(waiting) > 2 * most or newest.waits_since_s - each.waits_since_s > GRACE_S:
                each.transport.abort()


def require_words(connection: BoundedConnection, silence_s: float, unread: float = float("inf")) -> None:
    """From now on ends a connection whose peer, if it is its turn, says nothing for `silence_s`, nor reads.

    Args:
        unread: bytes of ours that the peer had not taken when it was looked at last.
    """
    transport = connection.transport
    if transport.is_closing():
        return
    left = transport.get_write_buffer_size()
    due_s = connection.waits_since_s + silence_s - time.monotonic()
    if connection.waits and due_s < 0 and not 0 < left < unread:
        transport.abort()
        return
    asyncio.get_running_loop().call_later(max(CHECK_S, due_s), require_words, connection, silence_s, left or unread)
