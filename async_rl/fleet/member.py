"""One instance of the pool and what is known of it; changed on the producer's event loop only."""

import asyncio
from dataclasses import dataclass, field

from async_rl.client import InstanceClient
from async_rl.protocol import InstanceInfo, InstanceState
from async_rl.types import WeightVersion


@dataclass(slots=True, eq=False)
class Member:
    """One instance. It serves `version` while it is ready; otherwise `reason` says why not."""

    name: str
    url: str
    client: InstanceClient
    state: InstanceState = "joining"
    reason: str | None = "it has not received any weights of this run yet"
    version: WeightVersion | None = None
    boot_id: str | None = None
    """Of the process behind the URL, where it registers itself: a new one means that its weights are gone."""
    last_seen_s: float = 0.0
    """`time.monotonic()` of its last answer; a heartbeat is none, as one comes from an instance that hangs, too."""
    num_returns: int = 0
    """How often it came back since the last publish, still holding its weights."""
    is_barred: bool = False
    """Whether it is out until the next publish whatever it says, because of what it answered."""
    failed_publishes: int = 0
    """Publishes in a row that it failed."""
    outstanding_tokens: int = 0
    """Expected tokens of the requests under way, prompts included."""
    outstanding_elsewhere: int = 0
    """The same for requests of other leaders of the run."""
    num_tokens: int = 0
    """Response tokens received from it."""
    tokens_per_s: float = 0.0
    num_failures: int = 0
    """Requests that it failed or did not finish."""
    requests: "set[asyncio.Task[None]]" = field(default_factory=set)
    """Requests under way; they are cancelled when the instance is lost."""

    def serves(self, version: WeightVersion) -> bool:
        return self.state == "ready" and self.version == version

    def info(self) -> InstanceInfo:
        return InstanceInfo(
            name=self.name,
            url=self.url,
            state=self.state,
            reason=self.reason,
            version=self.version,
            outstanding_tokens=self.outstanding_tokens + self.outstanding_elsewhere,
            num_requests=len(self.requests),
            tokens_per_s=self.tokens_per_s,
            num_tokens=self.num_tokens,
            num_failures=self.num_failures,
        )
