"""Watches the instances of a pool: brings them back, lets them join, and gives up those that are silent.

One task per instance asks for its health; one for all notices what does not hang on a single one: speeds, drained
instances, and requests for which no instance is left.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any, Protocol

from async_rl.config import PoolSection
from async_rl.errors import InstanceError, InstanceRefused, NoInstanceLeft
from async_rl.fleet.member import Member
from async_rl.fleet.router import Router
from async_rl.protocol import InstanceState
from async_rl.types import WeightVersion

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
INTERVAL_WITHOUT_S = 0.2
"""While requests wait and no instance is ready."""
PROBE_TIMEOUT_S = 5.0
LOG_INTERVAL_S = 10.0
SPEED_MEMORY_S = 10.0
REMEDY = "start or repair an instance, then start the run again: it can go on from its last checkpoint"

MAX_RETURNS = 3
"""Returns of one instance between two publishes: one that flaps must not keep a group going round for ever."""


class Fleet(Protocol):
    """What the watch sees of the pool, and does to it."""

    router: Router

    @property
    def members(self) -> tuple[Member, ...]: ...

    @property
    def version(self) -> WeightVersion | None: ...

    @property
    def can_admit(self) -> bool: ...

    async def admit_now(self, member: Member) -> None:
        """Loads the weights in training into an instance that lacks them, and puts it in service."""
        ...

    def bring_back(self, member: Member) -> None: ...

    def take_out(self, member: Member, reason: str, *, state: InstanceState = "stale") -> None: ...

    def remove(self, name: str) -> Member: ...

    def describe(self, what: str) -> str: ...

    def require_length(self, member: Member, max_model_len: int) -> None: ...


class Watch:
    """Runs from `start` to `stop`, on the producer's event loop."""

    def __init__(self, fleet: Fleet, config: PoolSection) -> None:
        self._fleet = fleet
        self._config = config
        self._probe_timeout_s = min(PROBE_TIMEOUT_S, config.heartbeat_timeout_s / 2)
        self._tasks: dict[Member | None, asyncio.Task[None]] = {}
        self._refused_versions: dict[Member, WeightVersion] = {}
        self._without_since_s: float | None = None
        self._next_log_s = 0.0
        self._num_tokens: dict[Member, int] = {}

    def start(self) -> None:
        """Begins to watch; a second call does nothing."""
        if None not in self._tasks:
            self._spawn(None, self._watch_all())
            for member in self._fleet.members:
                self.follow(member)

    def follow(self, member: Member) -> None:
        """Watches one more instance, if the watch goes on."""
        if None in self._tasks and member not in self._tasks:
            member.last_seen_s = member.last_seen_s or time.monotonic()
            self._spawn(member, self._watch(member))

    async def stop(self) -> None:
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, member: Member | None, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"watch of {member.name if member else 'the pool'}")
        self._tasks[member] = task
        # An error here is a mistake of ours: nobody would be watching from then on.
        task.add_done_callback(_report)

    async def _watch(self, member: Member) -> None:
        while member in self._fleet.members:
            await self._check(member)
            without = self._without_since_s is not None
            await asyncio.sleep(INTERVAL_WITHOUT_S if without else INTERVAL_S)
        self._tasks.pop(member, None)

    async def _check(self, member: Member) -> None:
        try:
            await member.client.health(self._probe_timeout_s)
        except InstanceRefused as error:
            # 503 and the like: it runs, but cannot serve; a whole publish may mend that.
            member.last_seen_s = time.monotonic()
            if member.state in ("ready", "dead"):
                self._fleet.take_out(member, str(error))
            return
        except InstanceError as error:
            silent_s = time.monotonic() - member.last_seen_s
            if silent_s > self._config.heartbeat_timeout_s and member.state != "dead":
                self._fleet.take_out(member, f"silent for {silent_s:.0f} s: {error}", state="dead")
            return
        member.last_seen_s = time.monotonic()
        if member.state not in ("ready", "draining") and not member.is_barred:
            try:
                await self._welcome(member)
            except InstanceError as error:
                logger.debug("%s", error)

    async def _welcome(self, member: Member) -> None:
        """An instance that answers and is not in service: it comes back, is admitted, or waits for the next publish."""
        version = self._fleet.version
        if version is None:
            if member.state == "dead":
                member.state = "stale"
            return
        # Another server may have taken its place.
        await member.client.learn_dialect(self._probe_timeout_s)
        self._fleet.require_length(member, await member.client.max_model_len(self._probe_timeout_s))
        actual = await member.client.weight_version(self._probe_timeout_s)
        is_gone = member not in self._fleet.members
        if is_gone or self._fleet.version != version or member.is_barred or member.state in ("ready", "draining"):
            return
        if actual == version and member.num_returns < MAX_RETURNS:
            member.num_returns += 1
            self._fleet.bring_back(member)
        elif self._fleet.can_admit and self._refused_versions.get(member) != version:
            try:
                await self._fleet.admit_now(member)
            except InstanceError as error:
                # Once for each version: what it refused it will refuse again.
                self._refused_versions[member] = version
                self._fleet.take_out(member, f"it could not join: {error}")
        else:
            member.state = "stale" if member.version else "joining"
            member.reason = f"it holds weight version {actual!r}: it needs the next publish"

    async def _watch_all(self) -> None:
        while True:
            self._measure()
            for member in self._fleet.members:
                if member.state == "draining" and not member.outstanding_tokens and not member.outstanding_elsewhere:
                    logger.info("%s is drained and leaves the pool", member.name)
                    self._fleet.remove(member.name)
            self._require_somebody()
            await asyncio.sleep(INTERVAL_WITHOUT_S)

    def _measure(self) -> None:
        """Keeps a mean of each instance's speed over the last seconds."""
        share = INTERVAL_WITHOUT_S / SPEED_MEMORY_S
        members = self._fleet.members
        for member in members:
            gained = member.num_tokens - self._num_tokens.get(member, member.num_tokens)
            member.tokens_per_s += share * (gained / INTERVAL_WITHOUT_S - member.tokens_per_s)
        self._num_tokens = {member: member.num_tokens for member in members}
        self._refused_versions = {m: v for m, v in self._refused_versions.items() if m in self._num_tokens}

    def _require_somebody(self) -> None:
        """Fails the requests that wait where no instance is in service for too long, or none can be any more."""
        version = self._fleet.version
        if version is None or not self._fleet.router.is_waited_for or self._serve(version):
            self._without_since_s = None
            return
        now = time.monotonic()
        if self._without_since_s is None:
            self._without_since_s = now
        waited_s = now - self._without_since_s
        if waited_s > self._config.timeout_s or self._is_hopeless():
            what = f"no instance has served weight version {version!r} for {waited_s:.0f} s"
            self._fleet.router.fail(NoInstanceLeft(f"{self._fleet.describe(what)}\n{REMEDY}"))
            self._without_since_s = None
        elif now >= self._next_log_s:
            self._next_log_s = now + LOG_INTERVAL_S
            left_s = self._config.timeout_s - waited_s
            logger.warning(self._fleet.describe(f"no instance is in service; waiting {left_s:.0f} s more for one"))

    def _serve(self, version: WeightVersion) -> bool:
        return any(member.serves(version) for member in self._fleet.members)

    def _is_hopeless(self) -> bool:
        """Nobody can come back before the next publish, and nobody new can be let in."""
        if self._fleet.can_admit:
            return False
        version = self._fleet.version
        return not any(
            not member.is_barred and member.num_returns < MAX_RETURNS and member.version == version
            for member in self._fleet.members
            if member.state in ("dead", "stale")
        )


def _report(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("%s ended", task.get_name(), exc_info=task.exception())
