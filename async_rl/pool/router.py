"""Which instance takes the next request: longest expected first, to whoever is likely to be done with it first.

An instance gets what keeps its engine full and no more; the rest of a batch waits here, so that one that joins or is
faster finds work (`credit.py`). Coroutines wait in `acquire`; they are woken when an instance gets room, joins or comes
back. What an instance has taken, but not begun, may be moved to an idle one (`moves.py`). All on one event loop.
"""

import asyncio
import heapq
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import count

from async_rl.pool.credit import MAX_QUEUED, QUEUE_S
from async_rl.pool.member import Member
from async_rl.pool.moves import next_moves
from async_rl.types import WeightVersion

MAX_PASSED_OVER = 16
"""Waiting requests looked at that no instance with room should take, because each has failed it before."""


@dataclass(slots=True, order=True)
class _Waiting:
    order: tuple[float, int]
    cost: int = field(compare=False)
    num_parts: int = field(compare=False)
    version: WeightVersion = field(compare=False)
    avoid: Collection[str] = field(compare=False)
    assigned: "asyncio.Future[list[Member]]" = field(compare=False)


class Router:
    """Assigns requests to the ready ones of `members`.

    Args:
        max_outstanding_tokens: expected tokens under way at one instance at most; an instance without any takes a
            request of whatever size.
        split_tail: whether a request may be shared among instances that are idle because hardly any other waits.
    """

    def __init__(
        self, members: Callable[[], Sequence[Member]], max_outstanding_tokens: int | None, split_tail: bool
    ) -> None:
        self._members = members
        self._max_outstanding_tokens = max_outstanding_tokens
        self._split_tail = split_tail
        self._waiting: list[_Waiting] = []
        self._counter = count()
        self._is_due = False
        self._promised: dict[Member, int] = {}

    async def acquire(
        self,
        cost: int,
        expected_tokens: float,
        version: WeightVersion,
        *,
        num_responses: int = 1,
        avoid: Collection[str] = (),
    ) -> list[Member]:
        """Waits for room for a request of `cost` tokens at an instance that serves `version`.

        Args:
            expected_tokens: of its longest response; more go first.
            num_responses: into as many requests it could be divided.
            avoid: URLs of instances that get it only if no other one serves.

        Returns:
            One instance, or several that each take a part of the request. Their outstanding tokens count it already;
            the caller gives it back with `release`.
        """
        assigned: asyncio.Future[list[Member]] = asyncio.get_running_loop().create_future()
        order = (-expected_tokens, next(self._counter))
        heapq.heappush(self._waiting, _Waiting(order, cost, num_responses, version, avoid, assigned))
        self.wake()
        try:
            members = await assigned
        except asyncio.CancelledError:
            if assigned.done() and not assigned.cancelled() and assigned.exception() is None:
                self._give_back(assigned.result(), cost, num_responses)
            raise
        self._keep_promise(members, num_responses)
        return members

    def release(self, member: Member, cost: int) -> None:
        """Ends a request, or its part, of `cost` tokens."""
        member.outstanding_tokens -= cost
        self.wake()

    @property
    def is_waited_for(self) -> bool:
        """Whether some request waits for an instance."""
        return any(not waiting.assigned.done() for waiting in self._waiting)

    def fail(self, error: Exception) -> None:
        """Raises `error` in everybody who waits."""
        for waiting in self._waiting:
            if not waiting.assigned.done():
                waiting.assigned.set_exception(error)
        self._waiting.clear()

    def wake(self) -> None:
        """Looks for room soon, when everybody who starts to wait at this moment does wait: order is among them."""
        if not self._is_due and (self._waiting or any(member.requests for member in self._members())):
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._assign)

    @staticmethod
    def part_of(cost: int, num_parts: int) -> int:
        """What each part of a divided request counts."""
        return -(-cost // num_parts)

    def _assign(self) -> None:
        self._is_due = False
        passed_over: list[_Waiting] = []
        while self._waiting and len(passed_over) < MAX_PASSED_OVER:
            waiting = heapq.heappop(self._waiting)
            if waiting.assigned.done():
                continue
            with_room = [m for m in self._members() if m.takes(waiting.version) and self._has_room(m, waiting.cost)]
            chosen = self._choose(waiting, with_room)
            if not chosen:
                passed_over.append(waiting)
                if not with_room:
                    break
                continue
            for member in chosen:
                member.outstanding_tokens += self.part_of(waiting.cost, len(chosen))
                self._promised[member] = self._promised.get(member, 0) + -(-waiting.num_parts // len(chosen))
                member.circuit.sent()
            waiting.assigned.set_result(chosen)
        for waiting in passed_over:
            heapq.heappush(self._waiting, waiting)
        if not self._waiting:
            for request in next_moves(self._members(), self._has_credit, time.monotonic()):
                request.move()

    def _choose(self, waiting: _Waiting, with_room: Sequence[Member]) -> list[Member]:
        candidates = [member for member in with_room if member.url not in waiting.avoid]
        if not candidates and not any(
            member.serves(waiting.version) and member.url not in waiting.avoid for member in self._members()
        ):
            candidates = list(with_room)
        usual = [member.speed for member in self._members() if member.speed]
        unknown = sum(usual) / len(usual) if usual else 1.0
        candidates.sort(key=lambda m: (m.outstanding_tokens + m.outstanding_elsewhere) / (m.speed or unknown))
        num_parts = 1
        if self._split_tail:
            num_idle = sum(member.outstanding_tokens == 0 for member in candidates)
            # Those that still wait get an idle instance each before this one gets a second.
            num_parts = max(1, min(waiting.num_parts, num_idle // (1 + len(self._waiting))))
        return candidates[:num_parts]

    def _has_room(self, member: Member, cost: int) -> bool:
        limit = self._max_outstanding_tokens
        if member.outstanding_tokens == 0:
            return True
        return self._has_credit(member) and (limit is None or member.outstanding_tokens + cost <= limit)

    def _has_credit(self, member: Member) -> bool:
        """Whether its engine has a place free, or will have one as soon as any response ends."""
        if member.num_open + self._promised.get(member, 0) >= member.credit.responses(member.client.max_concurrency):
            return False
        # One whose newest tokens are older than a request does not show that it passes that over.
        heard_s = member.heard_s
        num_queued = sum(heard_s - request.sent_s > QUEUE_S for request in member.waiting)
        return num_queued < MAX_QUEUED

    def _keep_promise(self, members: Sequence[Member], num_responses: int) -> None:
        """What was assigned is about to be sent, and counts among the member's requests from then on."""
        for member in members:
            left = self._promised.get(member, 0) - -(-num_responses // len(members))
            if left > 0:
                self._promised[member] = left
            else:
                self._promised.pop(member, None)

    def _give_back(self, members: Sequence[Member], cost: int, num_responses: int) -> None:
        self._keep_promise(members, num_responses)
        for member in members:
            member.circuit.reset_trial()
            self.release(member, self.part_of(cost, len(members)))
