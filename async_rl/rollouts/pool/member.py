"""One instance of the pool: its entry in the membership, its connection, its running requests, and how many more it may
get (`Circuit`, `Credit`)."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from async_rl.method.types import WeightVersion
from async_rl.rollouts.instance.client import InstanceClient
from async_rl.rollouts.instance.partial_rollout import PartialRollout
from async_rl.rollouts.pool.membership import BootId, InstanceEntry, State
from async_rl.shared.protocol.fleet import InstanceInfo


class GroupRequest:
    """A group's request, or a part of it.

    `cost` is the router's count for it, `num_moves` how often its partial rollouts were moved to another instance.
    """

    def __init__(self, partials: Sequence[PartialRollout], cost: int, num_moves: int = 0) -> None:
        self.partials = partials
        self.cost = cost
        self.num_moves = num_moves
        self.num_before = sum(len(partial.token_ids) for partial in partials)
        """Tokens of the partial rollouts when it was sent."""
        self.sent_s = time.monotonic()
        self.first_token_s: float | None = None
        self.num_tokens = 0
        """Response tokens received for it."""
        self.num_ended = 0
        """Responses that are finished."""
        self.is_moved = False
        """Whether it was cancelled to be continued by another instance, which is not a fault."""
        self.task: asyncio.Task[None] | None = None

    @property
    def num_open(self) -> int:
        return len(self.partials) - self.num_ended

    @property
    def waits(self) -> bool:
        """Whether it may still be in the instance's own queue: it has no token yet."""
        return self.first_token_s is None

    def speed(self, now_s: float) -> float:
        """Tokens per second of each of its responses, since the first token."""
        if self.first_token_s is None:
            return 0.0
        return self.num_tokens / len(self.partials) / max(now_s - self.first_token_s, 1e-3)

    def cancel(self) -> None:
        """Gives it up: its instance is lost."""
        if self.task is not None:
            self.task.cancel()

    def move(self) -> None:
        """Cancels it, so that another instance continues it."""
        self.is_moved = True
        self.cancel()


FIRST_CREDIT = 32
"""The initial credit of an instance that does not report its concurrency."""

MAX_CREDIT = 256
"""vLLM's own default of --max-num-seqs."""

QUEUE_S = 1.0
"""A request without a token for this long, while others progressed, waits in the instance's own queue."""

MAX_QUEUED = 2
"""Requests waiting there: one is needed so that the engine never runs empty, a second shows that it is full."""


class Credit:
    """How many responses an instance gets concurrently: enough to keep its engine full, never the whole batch. Pure.

    An engine is full with as many responses as its reported concurrency. If it reports none, the credit doubles each
    time all of it is in use and the newest request gets its first token soon: the engine started it immediately.
    """

    def __init__(self) -> None:
        self._found = FIRST_CREDIT

    def responses(self, reported: int | None) -> int:
        """Unfinished responses at which it gets no further group; the last group may exceed it."""
        return reported if reported is not None else self._found

    def first_token(self, num_open: int, waited_s: float) -> None:
        """A request got its first token `waited_s` after it was sent, with `num_open` unfinished responses in total."""
        if num_open >= self._found and waited_s < QUEUE_S:
            self._found = min(2 * self._found, MAX_CREDIT)


FIRST_PAUSE_S = 0.5
"""An engine that responds with 5xx because it is overloaded or changes its mode needs about this long."""

MAX_PAUSE_S = 8.0
"""A broken instance costs one trial in this many seconds; a repaired one is in use again after at most as long."""


class Circuit:
    """Stops new requests to an instance that has just failed one, then tries it with a single request. Pure.

        closed --failure--> open --after a pause--> half open (one trial) --success--> closed
                              ^-------------------------- failure, twice the pause ---'

    One failure is one incident, however many requests it ends: requests sent before the circuit opened are not counted
    again. An open circuit does not change the membership: running requests continue there, and nothing is barred. Times
    are seconds of a clock that the caller reads.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        """The last failure, until a success."""
        self._pause_s = FIRST_PAUSE_S
        self._opened_s = 0.0
        self._trials = 0

    @property
    def is_closed(self) -> bool:
        return self.reason is None

    @property
    def is_tried(self) -> bool:
        """Whether a trial is under way."""
        return self._trials > 0

    def retry_in_s(self, now_s: float) -> float:
        """Seconds until the next trial; 0 if one may be sent now."""
        return 0.0 if self.is_closed else max(0.0, self._opened_s + self._pause_s - now_s)

    def allows(self, now_s: float) -> bool:
        """Whether a request may be sent to the instance now."""
        return self.is_closed or (self._trials == 0 and self.retry_in_s(now_s) == 0.0)

    def sent(self) -> None:
        """A request was sent: a trial, if the circuit is not closed."""
        self._trials += 0 if self.is_closed else 1

    def succeeded(self, sent_s: float) -> None:
        """A request sent at `sent_s` generated tokens; one sent before the failure proves nothing."""
        if not self.is_closed and sent_s >= self._opened_s:
            self.reset()

    def failed(self, now_s: float, sent_s: float, reason: str) -> None:
        """A request sent at `sent_s` failed."""
        if self.is_closed:
            self._pause_s = FIRST_PAUSE_S
        elif sent_s < self._opened_s:
            return
        else:
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        self.reason, self._opened_s, self._trials = reason, now_s, 0

    def ended(self, sent_s: float) -> None:
        """A request sent at `sent_s` is over. If it was the trial and has shown nothing about the instance, as it was
        slow, moved, cancelled or invalid itself, another one may be sent."""
        if sent_s >= self._opened_s:
            self._trials = 0

    def reset_trial(self) -> None:
        """The trial was cancelled before it was sent: another one may be."""
        self._trials = 0

    def reset(self) -> None:
        """Restores the initial state."""
        self.reason, self._pause_s, self._trials = None, FIRST_PAUSE_S, 0


@dataclass(slots=True, eq=False)
class Member:
    """One instance; changed on the producer's event loop only, its `entry` by the pool's `Membership` only."""

    name: str
    client: InstanceClient
    entry: InstanceEntry
    last_seen_s: float = 0.0
    """`time.monotonic()` of its last response; heartbeats do not count, since an instance that hangs may send them."""
    circuit: Circuit = field(default_factory=Circuit)
    outstanding_tokens: int = 0
    """Expected tokens of the running requests, prompts included."""
    num_tokens: int = 0
    """Response tokens received from it."""
    num_tokens_measured: int | None = None
    """Those of them that `tokens_per_s` and `speed` count already; None before the first look."""
    tokens_per_s: float = 0.0
    """A recent mean, pauses included."""
    speed: float | None = None
    """Tokens per second while it had work; None before it was measured."""
    response_speed: float | None = None
    """Tokens per second of one response, in the last request that it finished."""
    last_received_s: float = 0.0
    """`time.monotonic()` of the last tokens of any request."""
    slowest_start_s: float | None = None
    """The longest time to the first token of a request that it started."""
    credit: Credit = field(default_factory=Credit)
    num_failures: int = 0
    """Requests that it failed or did not finish."""
    requests: set[GroupRequest] = field(default_factory=set)
    """Running requests; `begin`, `progress` and `end` update the figures that each assignment reads."""
    waiting: set[GroupRequest] = field(default_factory=set)
    """Those of them without a token, which may be in the instance's own queue."""
    suspicion: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a connection to it was lost: its health is checked at once."""
    num_open: int = 0
    """Responses that are not finished yet."""

    @property
    def url(self) -> str:
        return self.entry.url

    @property
    def state(self) -> State:
        return self.entry.state

    @property
    def reason(self) -> str | None:
        return self.entry.reason

    @property
    def version(self) -> WeightVersion | None:
        return self.entry.version

    @property
    def boot_id(self) -> BootId:
        return self.entry.boot_id

    def begin(self, request: GroupRequest) -> None:
        """A request is sent to it."""
        self.requests.add(request)
        self.waiting.add(request)
        self.num_open += request.num_open

    def progress(self, request: GroupRequest, num_tokens: int, num_ended: int, now_s: float) -> None:
        """A request has received `num_tokens` tokens and `num_ended` finished responses in total."""
        self.num_tokens += num_tokens - request.num_tokens
        if num_tokens and request.waits:
            request.first_token_s = now_s
            self.waiting.discard(request)
            waited_s = now_s - request.sent_s
            self.slowest_start_s = max(waited_s, self.slowest_start_s or 0.0)
            self.credit.first_token(self.num_open, waited_s)
        self.num_open -= num_ended - request.num_ended
        request.num_tokens, request.num_ended = num_tokens, num_ended

    def end(self, request: GroupRequest) -> None:
        """A request has finished, or was given up."""
        self.requests.discard(request)
        self.waiting.discard(request)
        self.num_open -= request.num_open

    def serves(self, version: WeightVersion) -> bool:
        return self.state == "ready" and self.version == version

    def takes(self, version: WeightVersion) -> bool:
        """Whether a request may be sent to it now."""
        return self.serves(version) and self.circuit.allows(time.monotonic())

    def info(self) -> InstanceInfo:
        return InstanceInfo(
            name=self.name,
            url=self.url,
            # For the clients that removed it, it is the same as dead.
            state="dead" if self.state == "gone" else self.state,
            reason=self.reason or self._pause(),
            version=self.version,
            boot_id=self.boot_id,
            outstanding_tokens=self.outstanding_tokens,
            num_requests=len(self.requests),
            tokens_per_s=self.tokens_per_s,
            num_tokens=self.num_tokens,
            num_failures=self.num_failures,
        )

    def _pause(self) -> str | None:
        """Why a ready instance gets no new requests at the moment."""
        if self.circuit.is_closed:
            return None
        left_s = self.circuit.retry_in_s(time.monotonic())
        return f"it gets one request to try it in {left_s:.1f} s: {self.circuit.reason}"
