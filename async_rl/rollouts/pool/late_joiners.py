"""Puts instances that join between two publishes in service, by loading the weights in training into them."""

import asyncio
from collections.abc import Awaitable, Callable

from async_rl.errors import InstanceError
from async_rl.rollouts.pool.member import Member
from async_rl.rollouts.pool.roster import HOLDING_TIMEOUT_S, Roster

ADMISSION_INTERVAL_S = 0.05


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
        this_task = asyncio.current_task()
        assert this_task is not None
        version = self._roster.version
        assert version is not None, "during a publish nobody is admitted"
        self._admissions.add(this_task)
        try:
            await self.admit(member)
            held = await member.client.holding(HOLDING_TIMEOUT_S)
            if held.version != version:
                raise InstanceError(f"instance {member.url} holds {held.version!r} after it was given {version!r}")
        except InstanceError as error:
            self._roster.note_failure(member, f"it could not join: {error}")
            return
        finally:
            self._admissions.discard(this_task)
        self._roster.note_admitted(member, version, held.boot_id)

    async def wait(self) -> None:
        """Waits until no admission is running: it and a publish must not overlap."""
        while self._admissions:
            await asyncio.sleep(ADMISSION_INTERVAL_S)
