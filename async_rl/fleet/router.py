"""Which instance takes the next request: longest expected first, to the instance with the fewest outstanding tokens.

Coroutines wait in `acquire`; they are woken when an instance gets room, joins or comes back. All on one event loop.
"""

import asyncio
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from async_rl.fleet.member import Member
from async_rl.types import WeightVersion


@dataclass(slots=True, order=True)
class _Waiting:
    order: tuple[float, int]
    cost: int = field(compare=False)
    num_parts: int = field(compare=False)
    version: WeightVersion = field(compare=False)
    avoid: Member | None = field(compare=False)
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

    async def acquire(
        self,
        cost: int,
        expected_tokens: float,
        version: WeightVersion,
        *,
        num_parts: int = 1,
        avoid: Member | None = None,
    ) -> list[Member]:
        """Waits for room for a request of `cost` tokens at an instance that serves `version`.

        Args:
            expected_tokens: of its longest response; more go first.
            num_parts: into how many requests it could be divided.
            avoid: an instance that gets it only if there is no other.

        Returns:
            One instance, or several that each take a part of the request. Their outstanding tokens count it already;
            the caller gives it back with `release`.
        """
        assigned: asyncio.Future[list[Member]] = asyncio.get_running_loop().create_future()
        waiting = _Waiting((-expected_tokens, next(self._counter)), cost, num_parts, version, avoid, assigned)
        heapq.heappush(self._waiting, waiting)
        self.wake()
        try:
            return await assigned
        except asyncio.CancelledError:
            if assigned.done() and not assigned.cancelled():
                self._give_back(assigned.result(), cost)
            raise

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
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._assign)

    @staticmethod
    def part_of(cost: int, num_parts: int) -> int:
        """What each part of a divided request counts."""
        return -(-cost // num_parts)

    def _assign(self) -> None:
        self._is_due = False
        left_over = []
        while self._waiting:
            waiting = heapq.heappop(self._waiting)
            if waiting.assigned.done():
                continue
            chosen = self._choose(waiting)
            if not chosen:
                left_over.append(waiting)
                break
            for member in chosen:
                member.outstanding_tokens += self.part_of(waiting.cost, len(chosen))
            waiting.assigned.set_result(chosen)
        for waiting in left_over:
            heapq.heappush(self._waiting, waiting)

    def _choose(self, waiting: _Waiting) -> list[Member]:
        serving = [member for member in self._members() if member.serves(waiting.version)]
        others = [member for member in serving if member is not waiting.avoid]
        candidates = [member for member in others or serving if self._has_room(member, waiting.cost)]
        candidates.sort(key=lambda member: member.outstanding_tokens + member.outstanding_elsewhere)
        num_parts = 1
        if self._split_tail:
            num_idle = sum(member.outstanding_tokens == 0 for member in candidates)
            # Those that still wait get an idle instance each before this one gets a second.
            num_parts = max(1, min(waiting.num_parts, num_idle // (1 + len(self._waiting))))
        return candidates[:num_parts]

    def _has_room(self, member: Member, cost: int) -> bool:
        limit = self._max_outstanding_tokens
        return limit is None or member.outstanding_tokens == 0 or member.outstanding_tokens + cost <= limit

    def _give_back(self, members: Sequence[Member], cost: int) -> None:
        for member in members:
            self.release(member, self.part_of(cost, len(members)))
