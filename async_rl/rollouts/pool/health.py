"""Watches the instances of a pool: returns them to service, lets them join, and gives up unresponsive ones.

One task per instance requests its health; one task for the pool handles everything that concerns several: speeds,
drained instances, and requests for which no instance is left.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from async_rl.config.pool_section import PoolSection
from async_rl.errors import ConnectionLost, Fenced, InstanceError, InstanceRefused, NeedsWeights, NoInstanceLeft
from async_rl.method.types import WeightVersion
from async_rl.rollouts.pool.late_joiners import LateJoiners
from async_rl.rollouts.pool.member import Member
from async_rl.rollouts.pool.roster import Roster

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
INTERVAL_WITHOUT_S = 0.2
"""While requests wait and no instance is ready."""
CHECKS_PER_S = 100
"""Of the whole pool; a check costs the producer a quarter of a millisecond."""

LOOKS_PER_S = 1000
"""At what the producer knows of an instance, ten microseconds each."""

SILENT_LIMIT_S = 15.0
"""An instance that is silent, or unwell, for longer is out of service: three heartbeats, or three checks without an
answer. Requests leave it earlier, after `pool.request_timeout_s` without a token."""

PROBE_TIMEOUT_S = SILENT_LIMIT_S / 3
LOG_INTERVAL_S = 10.0
SPEED_MEMORY_S = 10.0
REMEDY = "start or repair an instance, then start the run again: it can go on from its last checkpoint"

READY_INTERVAL_S = 0.5
"""At the start of a run."""

RECHECK_S = 0.2
"""Pause between two failed health checks after a lost connection, before the instance counts as lost."""


class HealthWatch:
    """Runs from `start` to `stop`, on the producer's event loop."""

    def __init__(self, roster: Roster, late_joiners: LateJoiners, config: PoolSection) -> None:
        self._roster = roster
        self._late_joiners = late_joiners
        self._config = config
        self._tasks: dict[Member | None, asyncio.Task[None]] = {}
        self._well_s: dict[Member, float] = {}
        """When each instance was last healthy, by `time.monotonic()`."""
        self._without_since_s: float | None = None
        self._next_log_s = 0.0

    def start(self) -> None:
        """Begins to watch; a second call does nothing."""
        if None not in self._tasks:
            self._spawn(None, self._watch_all())

    async def stop(self) -> None:
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, member: Member | None, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"watch of {member.name if member else 'the pool'}")
        self._tasks[member] = task
        # An error here is an internal mistake: the instance would not be watched from then on.
        task.add_done_callback(_report)

    async def _watch(self, member: Member, number: int) -> None:
        member.last_seen_s = member.last_seen_s or time.monotonic()
        self._well_s[member] = time.monotonic()
        # Not all of them at the same time.
        await asyncio.sleep(number / CHECKS_PER_S % self._interval_s())
        while member in self._roster.members:
            is_suspected = member.suspicion.is_set()
            member.suspicion.clear()
            error = await self._check(member)
            if is_suspected and isinstance(error, ConnectionLost):
                await asyncio.sleep(RECHECK_S)
                if isinstance(await self._check(member), ConnectionLost) and member.state != "dead":
                    self._roster.note_lost(member, str(error))
            with suppress(TimeoutError):
                await asyncio.wait_for(member.suspicion.wait(), self._interval_s())
        del self._well_s[member]
        self._tasks.pop(member, None)

    def _interval_s(self) -> float:
        """Between two checks of an instance, none of which is suspected: the more there are the longer, up to half of
        the time after which a silent one counts as lost."""
        shortest_s = INTERVAL_S if self._without_since_s is None else INTERVAL_WITHOUT_S
        bearable_s = min(len(self._roster.members) / CHECKS_PER_S, SILENT_LIMIT_S / 2)
        return max(shortest_s, bearable_s)

    async def _check(self, member: Member) -> InstanceError | None:
        """Requests its health, and applies the consequences; returns the instance's error, if any."""
        try:
            return await self._ask_health(member)
        except Fenced as error:
            # Whoever waits for an instance must end; the instance is sound.
            self._roster.router.fail(error)
            return None

    async def _ask_health(self, member: Member) -> InstanceError | None:
        try:
            boot_id = await member.client.health(PROBE_TIMEOUT_S)
        except InstanceRefused as error:
            self._note_refusal(member, error)
            if isinstance(error, NeedsWeights) and self._roster.version is not None:
                await self._late_joiners.mend(member, str(error))
            return error
        except InstanceError as error:
            silent_s = time.monotonic() - member.last_seen_s
            if silent_s > SILENT_LIMIT_S and member.state != "dead":
                self._roster.note_lost(member, f"silent for {silent_s:.0f} s: {error}")
            return error
        member.last_seen_s = self._well_s[member] = time.monotonic()
        self._roster.note_process(member, boot_id)
        try:
            if not member.entry.is_in_service:
                await self._welcome(member)
            elif self._is_stuck(member):
                await self._late_joiners.wake(member)
        except InstanceError as error:
            logger.debug("%s", error)
        return None

    def _is_stuck(self, member: Member) -> bool:
        """Whether it has work, and made no token of late."""
        has_work = bool(member.requests) or not member.circuit.is_closed
        return has_work and time.monotonic() - member.last_received_s > INTERVAL_S

    def _note_refusal(self, member: Member, error: InstanceRefused) -> None:
        """Handles a refused health check. With a server error it cannot serve at the moment, which may be temporary,
        and a complete publish may repair it; any other refusal, such as of the token, is not temporary."""
        member.last_seen_s = time.monotonic()
        unwell_s = time.monotonic() - self._well_s[member]
        if error.status < 500:
            if member.state in ("ready", "dead"):
                self._roster.note_failure(member, str(error))
        elif member.state == "dead" or (member.state == "ready" and unwell_s > SILENT_LIMIT_S):
            self._roster.note_unwell(member, str(error))

    async def _welcome(self, member: Member) -> None:
        """Handles a healthy instance out of service: it returns, is admitted, or waits for the next publish."""
        version = self._roster.version
        if version is None:
            if member.state == "dead":
                self._roster.note_useless(member, member.reason or "it waits for the publish under way")
            return
        if self._late_joiners.is_closed:
            await self._late_joiners.put_to_sleep(member)
        await self._roster.get_to_know(member, PROBE_TIMEOUT_S)
        held = await member.client.holding(PROBE_TIMEOUT_S)
        if self._roster.version != version or member.entry.is_in_service:
            return
        self._roster.note_answer(member, held.version, held.boot_id)
        if self._late_joiners.may_admit(member):
            await self._late_joiners.admit_now(member)

    async def _watch_all(self) -> None:
        while True:
            members = self._roster.members
            interval_s = max(INTERVAL_WITHOUT_S, len(members) / LOOKS_PER_S)
            for member in members:
                if member not in self._tasks:
                    self._spawn(member, self._watch(member, len(self._tasks)))
                if self._roster.is_drained(member):
                    logger.info("%s is drained and leaves the pool", member.name)
                    self._roster.remove(member.name)
                else:
                    self._measure(member, interval_s)
            # Pauses end, queues grow long and instances become idle without any event.
            self._roster.router.wake()
            self._require_somebody()
            await asyncio.sleep(interval_s)

    def _measure(self, member: Member, interval_s: float) -> None:
        """Keeps a running mean of an instance's speed over the last seconds."""
        share = interval_s / SPEED_MEMORY_S
        num_before, member.num_tokens_measured = member.num_tokens_measured, member.num_tokens
        if num_before is None:
            return
        rate = (member.num_tokens - num_before) / interval_s
        member.tokens_per_s += share * (rate - member.tokens_per_s)
        if member.requests and (rate or member.speed is not None):
            member.speed = rate if member.speed is None else member.speed + share * (rate - member.speed)

    def _require_somebody(self) -> None:
        """Fails the waiting requests if no instance is in service for too long, or none can be any more."""
        version = self._roster.version
        if version is None or not self._roster.router.is_waited_for or self._serve(version):
            self._without_since_s = None
            return
        now = time.monotonic()
        if self._without_since_s is None:
            self._without_since_s = now
        waited_s = now - self._without_since_s
        is_hopeless = self._is_hopeless()
        # A trial ends by itself: without tokens after `pool.request_timeout_s`.
        if (waited_s > self._config.timeout_s and not self._is_tried(version)) or is_hopeless:
            what = f"no instance has served weight version {version!r} for {waited_s:.0f} s"
            if is_hopeless:
                what = f"no instance can serve weight version {version!r} before the next publish"
            self._roster.router.fail(NoInstanceLeft(f"{self._roster.describe(what)}\n{REMEDY}"))
            self._without_since_s = None
        elif now >= self._next_log_s:
            self._next_log_s = now + LOG_INTERVAL_S
            left_s = max(0.0, self._config.timeout_s - waited_s)
            logger.warning(self._roster.describe(f"no instance is in service; waiting {left_s:.0f} s more for one"))

    def _serve(self, version: WeightVersion) -> bool:
        return any(member.serves(version) and member.circuit.is_closed for member in self._roster.members)

    def _is_tried(self, version: WeightVersion) -> bool:
        return any(member.serves(version) and member.circuit.is_tried for member in self._roster.members)

    def _is_hopeless(self) -> bool:
        """Whether no instance can return before the next publish, and no new one can be admitted."""
        if self._late_joiners.admit is not None:
            return False
        version = self._roster.version
        if version is not None and any(member.serves(version) for member in self._roster.members):
            return False
        return not self._roster.can_return


def _report(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("%s ended", task.get_name(), exc_info=task.exception())


async def wait_until_healthy(roster: Roster, timeout_s: float, *, publishes: bool) -> int:
    """Waits until every instance is healthy, or until `timeout_s` if at least one is.

    Args:
        publishes: whether complete weights follow, which repair an instance that an earlier trainer left with an
            incomplete update: such an instance need not be waited for.

    Returns:
        Prompt plus response tokens that each healthy instance accepts.

    Raises:
        NoInstanceLeft: none was healthy in time.
    """
    deadline = time.monotonic() + timeout_s
    next_log = 0.0
    lengths: dict[Member, int] = {}
    while True:
        waiting = [member for member in roster.members if member not in lengths]
        found = await asyncio.gather(*(_max_model_len(roster, member, publishes) for member in waiting))
        lengths |= {member: length for member, length in zip(waiting, found, strict=True) if length is not None}
        # Members come and go meanwhile.
        lengths = {member: lengths[member] for member in roster.members if member in lengths}
        waiting = [member for member in roster.members if member not in lengths]
        if (lengths and not waiting) or time.monotonic() > deadline:
            break
        if time.monotonic() >= next_log:
            next_log = time.monotonic() + LOG_INTERVAL_S
            logger.info("waiting for %s", ", ".join(m.url for m in waiting) or "an instance to register")
        await asyncio.sleep(READY_INTERVAL_S)
    for member in waiting:
        logger.warning("going on without %s: %s", member.url, member.reason)
    if not lengths:
        raise NoInstanceLeft(f"{roster.describe(f'no instance became healthy within {timeout_s:g} s')}\n{REMEDY}")
    return min(lengths.values())


async def _max_model_len(roster: Roster, member: Member, publishes: bool) -> int | None:
    """The length that a healthy instance reports, after learning its dialect; None if it cannot serve yet."""
    try:
        try:
            roster.note_process(member, await member.client.health(PROBE_TIMEOUT_S))
        except NeedsWeights:
            if not publishes:
                raise
        await member.client.learn_dialect(PROBE_TIMEOUT_S)
        length = await member.client.max_model_len(PROBE_TIMEOUT_S)
    except InstanceError as error:
        roster.note_useless(member, str(error))
        return None
    member.last_seen_s = time.monotonic()
    return length
