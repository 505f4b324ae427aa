"""Selects running requests to move to an instance that is idle. Pure; for the router.

A request that waits in an instance's queue has no tokens, so nothing is lost when it is sent to another one. A started
request stays, because its prompt and tokens would have to be computed again, unless its instance is so slow that this
pays off many times over.
"""

from collections.abc import Callable, Sequence

from async_rl.pool.credit import QUEUE_S
from async_rl.pool.member import Member
from async_rl.pool.request import Request

MAX_MOVES = 1
"""Per response: one that is slow to start because of its size is as slow at the next instance."""

STRAGGLING = 8.0
"""How many times faster an idle instance must have been for a started response to be moved there: below that,
computing the prompt again may take as long as the rest."""

STRAGGLING_S = 10.0
"""Time after which a request's speed is known."""


def next_moves(members: Sequence[Member], has_credit: Callable[[Member], bool], now_s: float) -> list[Request]:
    """Requests to cancel now, at most one for each instance that could take it instead; no other request waits."""
    ready = [member for member in members if member.state == "ready"]
    free = [m for m in ready if m.circuit.is_closed and has_credit(m) and not m.waiting]
    idle = [member for member in free if not member.requests]
    if not free or (len(free) == len(ready) and not idle):
        # Nobody takes anything, or nobody has too much.
        return []
    # Cancelled, but not yet arrived at the new instance: checking an interrupted response may take seconds.
    num_moving = sum(request.is_moved for member in ready for request in member.requests)
    num_free = len(free) - num_moving
    if num_free <= 0:
        return []
    taking = set(free)
    queued = [r for member in ready if member not in taking for r in _queued(member, now_s)]
    # The latest one of the longest queue: the earlier ones will start sooner.
    queued.sort(key=lambda request: -request.sent_s)
    moves = queued[:num_free]
    slow = [request for member in ready for request in member.requests if _is_known(request, now_s)]
    slow.sort(key=lambda request: request.speed(now_s))
    for member in idle[: max(0, len(idle) - num_moving - len(moves))]:
        # The slowest first: if that one stays, all do.
        if slow and member.response_speed is not None and member.response_speed > STRAGGLING * slow[0].speed(now_s):
            moves.append(slow.pop(0))
    return moves


def _queued(member: Member, now_s: float) -> list[Request]:
    """Requests that its engine has not started. Without streaming these cannot be distinguished from started ones."""
    if not member.client.has_streamed:
        return []
    waiting = [r for r in member.waiting if r.num_moves < MAX_MOVES and not r.is_moved]
    # It generates tokens for others, so the time to the first token does not explain the wait.
    return [r for r in waiting if now_s - r.sent_s > QUEUE_S and member.heard_s > r.sent_s]


def _is_known(request: Request, now_s: float) -> bool:
    """Whether a started response has run long enough to be compared with an idle instance, and may be moved."""
    began_s = request.first_token_s
    return (
        began_s is not None
        and now_s - began_s >= STRAGGLING_S
        and request.num_moves < MAX_MOVES
        and not request.is_moved
    )
