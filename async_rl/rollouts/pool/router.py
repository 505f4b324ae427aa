"""Assigns requests to instances: longest expected first, to the instance that is likely to finish it first.

A later turn of a rollout goes where the earlier one was generated, unless this instance has far more to do than the
least loaded one: the keys and values are there, and need not be computed again.

An instance gets enough to keep its engine full and no more; the rest of a batch waits here, so that one that joins or
is faster finds work (`member.Credit`). Coroutines wait in `acquire`; they are woken when an instance has room, joins or
returns. All on one event loop.

Requests that an instance has accepted but not started may be moved to an idle one (`next_moves`): they have no tokens,
so nothing is lost. A started request stays, because its prompt and tokens would have to be computed again, unless its
instance is so slow that this pays off many times over.
"""

import asyncio
import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from async_rl.method.types import WeightVersion
from async_rl.rollouts.pool.member import MAX_QUEUED, QUEUE_S, GroupRequest, Member

MAX_PASSED_OVER = 16
"""Maximum of waiting requests skipped because each instance with room has failed them before."""

MUCH_MORE_LOADED = 1.5
"""A later turn leaves its instance when this has so many times the work of the least loaded one, and beyond that more
than computing the earlier turns again: below that, differences pass as turns end."""

SOON_S = 0.001
RESTS = 4.0
"""Looking through the instances that takes longer than `SOON_S`, as there are many, is done again after a rest of so
many times as long: the event loop has other things to do."""

ASSIGNED_AT_ONCE = 512
GRANTED_AT_ONCE = 8
"""Assigning a request takes some microseconds, sending it a millisecond; then others have their turn on the loop."""


@dataclass(frozen=True, slots=True)
class Cached:
    """The instance at `url` has keys and values of a request's first `num_tokens` tokens: it served an earlier turn."""

    url: str
    num_tokens: int


@dataclass(slots=True, order=True)
class _Waiting:
    order: tuple[float, int]
    cost: int = field(compare=False)
    num_responses: int = field(compare=False)
    version: WeightVersion = field(compare=False)
    avoid: Collection[str] = field(compare=False)
    cached: Cached | None = field(compare=False)
    assigned: "asyncio.Future[Member]" = field(compare=False)


class _Open:
    """The instances that take requests of one version, by their load, while several requests are assigned."""

    def __init__(self, members: Sequence[Member], version: WeightVersion, has_room: Callable[[Member], bool]) -> None:
        self._members = members
        self._version = version
        self._has_room = has_room
        speeds = [member.speed for member in members if member.speed]
        self._unknown = sum(speeds) / len(speeds) if speeds else 1.0
        self._numbers = {member.url: number for number, member in enumerate(members)}
        self._loads_s: dict[int, float] = {}
        """Of each one with room, by its number."""
        self._by_load: list[tuple[float, int]] = []
        """A heap of these, and of loads that are outdated."""
        for member in members:
            self.note_changed(member)

    @property
    def is_empty(self) -> bool:
        return not self._loads_s

    def note_changed(self, member: Member) -> None:
        """Its load or its room is another one."""
        number = self._numbers[member.url]
        self._loads_s.pop(number, None)
        if member.takes(self._version) and self._has_room(member):
            self._loads_s[number] = load_s = member.outstanding_tokens / (member.speed or self._unknown)
            heapq.heappush(self._by_load, (load_s, number))

    def choose(self, avoid: Collection[str], cached: Cached | None) -> Member | None:
        """Who takes a request, of those with room; see `Router.acquire`."""
        least = self._least_loaded(avoid)
        if least is None and not any(m.serves(self._version) and m.url not in avoid for m in self._members):
            avoid = ()
            least = self._least_loaded(avoid)
        if least is None:
            return None
        if cached is not None and cached.url not in avoid:
            number = self._numbers.get(cached.url)
            if number in self._loads_s:
                again_s = cached.num_tokens / (self._members[number].speed or self._unknown)
                if self._loads_s[number] <= MUCH_MORE_LOADED * self._loads_s[least] + again_s:
                    return self._members[number]
        return self._members[least]

    def _least_loaded(self, avoid: Collection[str]) -> int | None:
        avoided = []
        least = None
        while self._by_load:
            load_s, number = self._by_load[0]
            is_present = self._loads_s.get(number) == load_s
            if is_present and self._members[number].url not in avoid:
                least = number
                break
            heapq.heappop(self._by_load)
            if is_present:
                avoided.append((load_s, number))
        for entry in avoided:
            heapq.heappush(self._by_load, entry)
        return least


class Router:
    """Assigns requests to the ready ones of `members`."""

    def __init__(self, members: Callable[[], Sequence[Member]]) -> None:
        self._members = members
        self._waiting: list[_Waiting] = []
        self._counter = count()
        self._is_due = False
        self._looked_s = 0.0
        """How long the last assignment looked through all instances."""
        self._granted: deque[tuple[_Waiting, Member]] = deque()
        """Assigned, and not told yet."""
        self._is_granting = False
        self._promised: dict[Member, int] = {}

    async def acquire(
        self,
        cost: int,
        expected_tokens: float,
        version: WeightVersion,
        *,
        num_responses: int = 1,
        avoid: Collection[str] = (),
        cached: Cached | None = None,
    ) -> Member:
        """Waits for room for a request of `cost` tokens at an instance that serves `version`.

        Args:
            expected_tokens: of its longest response; requests with more go first.
            num_responses: how many responses it asks for.
            avoid: URLs of instances that get it only if no other one serves.
            cached: where it continues an earlier turn; another instance gets it only if this one has no room, or is far
                more loaded.

        Returns:
            The instance. Its outstanding tokens already include the request; the caller ends it with `release`.
        """
        assigned: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
        order = (-expected_tokens, next(self._counter))
        heapq.heappush(self._waiting, _Waiting(order, cost, num_responses, version, avoid, cached, assigned))
        self.wake()
        try:
            member = await assigned
        except asyncio.CancelledError:
            if assigned.done() and not assigned.cancelled() and assigned.exception() is None:
                self._give_back(assigned.result(), cost, num_responses)
            raise
        self._keep_promise(member, num_responses)
        return member

    def release(self, member: Member, cost: int) -> None:
        """Ends a request of `cost` tokens."""
        member.outstanding_tokens -= cost
        self.wake()

    @property
    def is_waited_for(self) -> bool:
        """Whether some request waits for an instance."""
        return any(not waiting.assigned.done() for waiting in self._waiting)

    def fail(self, error: Exception) -> None:
        """Raises `error` in every waiting coroutine."""
        for waiting in self._waiting:
            if not waiting.assigned.done():
                waiting.assigned.set_exception(error)
        self._waiting.clear()

    def wake(self) -> None:
        """Schedules an assignment, after all coroutines that start to wait now are in the queue and ordered."""
        if not self._is_due and (self._waiting or any(member.requests for member in self._members())):
            self._is_due = True
            loop = asyncio.get_running_loop()
            if self._looked_s < SOON_S:
                loop.call_soon(self._assign)
            else:
                loop.call_later(RESTS * self._looked_s, self._assign)

    def _assign(self) -> None:
        self._is_due = False
        self._looked_s = 0.0
        num_assigned = 0
        passed_over: list[_Waiting] = []
        open_ones: dict[WeightVersion, _Open] = {}
        while self._waiting and len(passed_over) < MAX_PASSED_OVER and num_assigned < ASSIGNED_AT_ONCE:
            waiting = heapq.heappop(self._waiting)
            if waiting.assigned.done():
                continue
            if (takers := open_ones.get(waiting.version)) is None:
                with self._looking():
                    takers = open_ones[waiting.version] = _Open(self._members(), waiting.version, self._has_room)
            chosen = takers.choose(waiting.avoid, waiting.cached)
            if chosen is None:
                passed_over.append(waiting)
                if takers.is_empty:
                    break
                continue
            chosen.outstanding_tokens += waiting.cost
            self._promised[chosen] = self._promised.get(chosen, 0) + waiting.num_responses
            chosen.circuit.sent()
            takers.note_changed(chosen)
            self._granted.append((waiting, chosen))
            num_assigned += 1
        for waiting in passed_over:
            heapq.heappush(self._waiting, waiting)
        if not self._waiting:
            with self._looking():
                for request in next_moves(self._members(), self._has_credit, time.monotonic()):
                    request.move()
        if num_assigned == ASSIGNED_AT_ONCE:
            self.wake()
        self._grant()

    def _grant(self) -> None:
        """Has some of the requests sent that were assigned, in each round of the event loop."""
        for _ in range(min(GRANTED_AT_ONCE, len(self._granted))):
            waiting, member = self._granted.popleft()
            if waiting.assigned.done():
                self._give_back(member, waiting.cost, waiting.num_responses)
            else:
                waiting.assigned.set_result(member)
        if self._granted and not self._is_granting:
            self._is_granting = True
            asyncio.get_running_loop().call_soon(self._go_on_granting)

    def _go_on_granting(self) -> None:
        self._is_granting = False
        self._grant()

    @contextmanager
    def _looking(self) -> Iterator[None]:
        began_s = time.monotonic()
        yield
        self._looked_s += time.monotonic() - began_s

    def _has_room(self, member: Member) -> bool:
        return member.outstanding_tokens == 0 or self._has_credit(member)

    def _has_credit(self, member: Member) -> bool:
        """Whether its engine has a free slot, or will have one as soon as any response ends."""
        if member.num_open + self._promised.get(member, 0) >= member.credit.responses(member.client.max_concurrency):
            return False
        # If its newest tokens are older than a request, that does not show that the request is queued.
        last_received_s = member.last_received_s
        num_queued = sum(last_received_s - request.sent_s > QUEUE_S for request in member.waiting)
        return num_queued < MAX_QUEUED

    def _keep_promise(self, member: Member, num_responses: int) -> None:
        """An assigned request is about to be sent, and from then on counts among the member's requests."""
        left = self._promised.get(member, 0) - num_responses
        if left > 0:
            self._promised[member] = left
        else:
            self._promised.pop(member, None)

    def _give_back(self, member: Member, cost: int, num_responses: int) -> None:
        self._keep_promise(member, num_responses)
        member.circuit.reset_trial()
        self.release(member, cost)


MAX_MOVES = 1
"""Per response: one that is slow to start because of its size is as slow at the next instance."""

STRAGGLING = 8.0
"""How many times faster an idle instance must have been for a started response to be moved there: below that,
computing the prompt again may take as long as the rest. A request without a token moves when it has waited for so many
times the longest time to the first token at those that could take it."""

STRAGGLING_S = 10.0
"""Time after which a request's speed, or silence, says something."""


def next_moves(members: Sequence[Member], has_credit: Callable[[Member], bool], now_s: float) -> list[GroupRequest]:
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
    starts_s = [member.slowest_start_s for member in free if member.slowest_start_s is not None]
    silent_s = max(STRAGGLING_S, STRAGGLING * max(starts_s)) if starts_s else math.inf
    queued = [r for member in ready if member not in taking for r in _queued(member, now_s, silent_s)]
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


def _queued(member: Member, now_s: float, silent_s: float) -> list[GroupRequest]:
    """Requests that its engine has not started. Without streaming these cannot be distinguished from started ones.

    While it generates for others, the time to the first token does not explain a wait; nor a wait beyond `silent_s`.
    """
    if not member.client.streams:
        return []
    waiting = [r for r in member.waiting if r.num_moves < MAX_MOVES and not r.is_moved]
    return [
        r
        for r in waiting
        if now_s - r.sent_s
        > (QUEUE_S if member.client.has_streamed and member.last_received_s > r.sent_s else silent_s)
    ]


def _is_known(request: GroupRequest, now_s: float) -> bool:
    """Whether a started response has run long enough to be compared with an idle instance, and may be moved."""
    began_s = request.first_token_s
    return (
        began_s is not None
        and now_s - began_s >= STRAGGLING_S
        and request.num_moves < MAX_MOVES
        and not request.is_moved
    )
