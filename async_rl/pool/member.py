"""One instance of the pool: its entry in the membership, its connection, and its running requests."""

import asyncio
import time
from dataclasses import dataclass, field

from async_rl.instance.client import InstanceClient
from async_rl.pool.circuit import Circuit
from async_rl.pool.credit import Credit
from async_rl.pool.membership import BootId, Standing, State
from async_rl.pool.request import Request
from async_rl.protocol.fleet import InstanceInfo
from async_rl.types import WeightVersion


@dataclass(slots=True, eq=False)
class Member:
    """One instance; changed on the producer's event loop only, its `standing` by the pool's `Membership` only."""

    name: str
    client: InstanceClient
    standing: Standing
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
    heard_s: float = 0.0
    """`time.monotonic()` of the last tokens of any request."""
    credit: Credit = field(default_factory=Credit)
    num_failures: int = 0
    """Requests that it failed or did not finish."""
    requests: set[Request] = field(default_factory=set)
    """Running requests; `begin`, `progress` and `end` update the figures that each assignment reads."""
    waiting: set[Request] = field(default_factory=set)
    """Those of them without a token, which may be in the instance's own queue."""
    suspicion: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a connection to it was lost: its health is checked at once."""
    num_open: int = 0
    """Responses that are not finished yet."""

    @property
    def url(self) -> str:
        return self.standing.url

    @property
    def state(self) -> State:
        return self.standing.state

    @property
    def reason(self) -> str | None:
        return self.standing.reason

    @property
    def version(self) -> WeightVersion | None:
        return self.standing.version

    @property
    def boot_id(self) -> BootId:
        return self.standing.boot_id

    def begin(self, request: Request) -> None:
        """A request is sent to it."""
        self.requests.add(request)
        self.waiting.add(request)
        self.num_open += request.num_open

    def progress(self, request: Request, num_tokens: int, num_ended: int, now_s: float) -> None:
        """A request has received `num_tokens` tokens and `num_ended` finished responses in total."""
        self.num_tokens += num_tokens - request.num_tokens
        if num_tokens and request.waits:
            request.first_token_s = now_s
            self.waiting.discard(request)
            self.credit.first_token(self.num_open, now_s - request.sent_s)
        self.num_open -= num_ended - request.num_ended
        request.num_tokens, request.num_ended = num_tokens, num_ended

    def end(self, request: Request) -> None:
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
