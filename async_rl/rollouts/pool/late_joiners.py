"""Puts instances that join between two publishes in service, by loading the weights in training into them; and those
that another program has put to sleep."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from async_rl.errors import InstanceError
from async_rl.rollouts.pool.member import Member
from async_rl.rollouts.pool.roster import HOLDING_TIMEOUT_S, Roster

logger = logging.getLogger(__name__)

ADMISSION_INTERVAL_S = 0.05

WAKE_TIMEOUT_S = 60.0
"""Weights come back from the host in seconds."""


class LateJoiners:
    """Admits instances to the `roster` while a version is in training."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._admissions: set[asyncio.Task[None]] = set()
        self.admit: Callable[[Member], Awaitable[None]] | None = None
        """Loads the weights in training into an instance; raises InstanceError. If it is None, no instance joins
        between two publishes."""
        self.is_closed = False
        """Whether the devices are the trainer's until the next publish."""

    def may_admit(self, member: Member) -> bool:
        """Whether it may receive the weights in training now."""
        return self.admit is not None and not self.is_closed and self._roster.may_be_admitted(member)

    async def admit_now(self, member: Member) -> None:
        """Loads the weights in training into an instance and puts it in service; one that fails is not tried again
        before the next publish."""
        assert self.admit is not None, "asked to admit without a way to"
        version = self._roster.version
        assert version is not None, "during a publish nobody is admitted"
        with self._holding_back():
            try:
                await self.admit(member)
                held = await member.client.holding(HOLDING_TIMEOUT_S)
                if held.version != version:
                    raise InstanceError(f"instance {member.url} holds {held.version!r} after it was given {version!r}")
            except InstanceError as error:
                self._roster.note_failure(member, f"it could not join: {error}")
                return
        self._roster.note_admitted(member, version, held.boot_id)

    async def mend(self, member: Member, reason: str) -> None:
        """Takes an instance that has lost its weights out of service; it gets them again at once, or with the next
        publish."""
        if member.state == "ready":
            self._roster.note_lost(member, reason)
            if not self.may_admit(member):
                # It may report the version that it had.
                self._roster.note_failure(member, reason)
        if self.may_admit(member):
            await self.admit_now(member)

    async def wake(self, member: Member) -> None:
        """Wakes an instance in service that is asleep or paused: another program than this run has asked for that.

        Raises:
            InstanceError: it does not answer.
        """
        if self.is_closed or self._roster.version is None:
            return
        with self._holding_back():
            client = member.client
            if not await client.is_sleeping(HOLDING_TIMEOUT_S):
                return
            logger.warning("%s sleeps or is paused, as another program has asked for: it is woken", member.url)
            # Other servers than the embedded engine do not tell whether they have dropped their weights.
            for tag in ("weights", "kv_cache") if client.dialect.holds_what_it_received else ("kv_cache",):
                await client.wake_up(tag, WAKE_TIMEOUT_S)
            if await client.is_sleeping(HOLDING_TIMEOUT_S):
                reason = "another program has put it to sleep or paused it, and it does not wake with its weights"
                await self.mend(member, reason)

    async def put_to_sleep(self, member: Member) -> None:
        """Has an instance that came while the devices are the trainer's leave them.

        Raises:
            InstanceError: it does not answer, or cannot sleep.
        """
        with self._holding_back():
            await member.client.sleep(HOLDING_TIMEOUT_S)

    @contextmanager
    def _holding_back(self) -> Iterator[None]:
        """A publish waits for the end of the context, in which an instance's state is changed."""
        this_task = asyncio.current_task()
        assert this_task is not None
        is_outermost = this_task not in self._admissions
        self._admissions.add(this_task)
        try:
            yield
        finally:
            if is_outermost:
                self._admissions.discard(this_task)

    async def wait(self) -> None:
        """Waits until no instance's state is being changed: that and a publish must not overlap."""
        while self._admissions:
            await asyncio.sleep(ADMISSION_INTERVAL_S)
