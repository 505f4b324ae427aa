"""Which requests under way should rather be at an instance that has nothing to do. Pure; for the router.

A request that waits in an instance's queue has no tokens, so that nothing is lost when it is sent to another one. One
that was begun stays, because its prompt and tokens would have to be computed again; unless its instance is so slow that
this pays many times over.
"""

from collections.abc import Callable, Sequence

from async_rl.pool.credit import QUEUE_S
from async_rl.pool.member import Member
from async_rl.pool.request import Request

MAX_MOVES = 1
"""Of one group's responses: what takes long to begin because of its size takes as long at the next instance."""

STRAGGLING = 8.0
"""How many times faster an idle instance must have been for a response that was begun to be moved there: below that
the prompt may take as long to compute again as the rest."""

STRAGGLING_S = 10.0
"""Time in which a request shows its pace."""


def next_moves(members: Sequence[Member], has_credit: Callable[[Member], bool], now_s: float) -> list[Request]:
    """Requests to call off now, at most one for each instance that could take it instead; nobody else waits."""
    ready = [member for member in members if member.state == "ready"]
    free = [m for m in ready if m.circuit.is_closed and has_credit(m) and not m.waiting]
    # Those that were called off, and have not come to where they go: a broken answer may take seconds to be checked.
    num_moving = sum(request.is_moved for member in ready for request in member.requests)
    num_free = len(free) - num_moving
    if num_free <= 0:
        return []
    queued = [r for member in ready if member not in free for r in _queued(member, now_s)]
    # Of the longest queue the one that was sent last: the others are nearer to their turn.
    queued.sort(key=lambda request: -request.sent_s)
    moves = queued[:num_free]
    idle = [member for member in free if not member.requests]
    for member in idle[: max(0, len(idle) - num_moving - len(moves))]:
        pace = member.response_speed
        slow = [r for other in ready if other is not member for r in other.requests if r not in moves]
        slow = [request for request in slow if pace is not None and _straggles(request, pace, now_s)]
        moves += sorted(slow, key=lambda r: r.speed(now_s))[:1]
    return moves


def _queued(member: Member, now_s: float) -> list[Request]:
    """Requests that its engine passes over. Where answers come whole, nothing tells these from those at work."""
    if not member.client.has_streamed:
        return []
    waiting = [r for r in member.waiting if r.num_moves < MAX_MOVES and not r.is_moved]
    # It makes tokens for others: so this is no matter of the time to the first token.
    return [r for r in waiting if now_s - r.sent_s > QUEUE_S and member.heard_s > r.sent_s]


def _straggles(request: Request, pace: float, now_s: float) -> bool:
    """Whether an instance of `pace`, tokens of one response per second, would be done far earlier."""
    began_s = request.first_token_s
    if began_s is None or now_s - began_s < STRAGGLING_S or request.num_moves >= MAX_MOVES or request.is_moved:
        return False
    return pace > STRAGGLING * request.speed(now_s)
