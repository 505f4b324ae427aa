"""Where both pools have the same devices: the instances leave them to the trainer (`run.placement = "turns"`).

Called before the trainer takes memory: at its start, since an earlier start may have left instances awake, and at the
end of each batch's rollouts. An instance that does not go to sleep in time keeps memory that the trainer needs, as one
that hangs does. So the launcher, which has started it on this host, is asked to end it and start it again.
"""

import asyncio
import logging
from pathlib import Path

from async_rl.errors import InstanceError, WriteFailed
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.pool.member import Member
from async_rl.rollouts.pool.membership import BootId
from async_rl.shared.programs.end_request import ask_to_end, is_answered, withdraw

log = logging.getLogger(__name__)

END_TIMEOUT_S = 20.0
"""For the launcher to see the request, kill a process and wait for its end. It looks several times per second."""

POLL_S = 0.1


class Rest:
    """Waits at most `timeout_s` for the instances to sleep, and `END_TIMEOUT_S` for the launcher."""

    def __init__(self, pool: InferencePool, run_dir: Path, timeout_s: float) -> None:
        self._pool = pool
        self._run_dir = run_dir
        self._timeout_s = timeout_s
        self._asked: set[tuple[str, BootId]] = set()
        """Processes that the launcher was asked to end. What is silent in their place is being started."""

    async def begin(self) -> None:
        """Returns when every instance sleeps, has ended, or was named in an error."""
        awake = await self._pool.sleep(self._timeout_s)
        new = {member: error for member, error in awake.items() if (member.url, member.boot_id) not in self._asked}
        if not new:
            return
        self._asked |= {(member.url, member.boot_id) for member in new}
        for member, error in new.items():
            log.error("%s holds memory that the trainer needs: it did not go to sleep: %s", member.url, error)
        if await self._are_ended(new):
            log.warning("the launcher has ended %s and starts them again", ", ".join(member.url for member in new))
            return
        log.error(
            "not all of %s have been ended: the trainer may find too little memory on its device; end those that still "
            "run by hand; async-rl run ends and starts again what it has started itself",
            ", ".join(member.url for member in new),
        )

    async def _are_ended(self, awake: dict[Member, InstanceError]) -> bool:
        """Whether the launcher has ended these instances within `END_TIMEOUT_S`."""
        try:
            ask_to_end(self._run_dir, {member.url: f"did not go to sleep: {error}" for member, error in awake.items()})
        except WriteFailed as error:
            log.error("the launcher cannot be asked to end them: %s", error)
            return False
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                while not is_answered(self._run_dir):
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            return False
        finally:
            withdraw(self._run_dir)
        return True
