"""Waits at the start of a run until the instances of a pool respond; for `async_rl.pool.inference_pool`."""

import asyncio
import logging
import time

from async_rl.errors import InstanceError, NeedsWeights, NoInstanceLeft
from async_rl.pool.health import LOG_INTERVAL_S, PROBE_TIMEOUT_S, REMEDY
from async_rl.pool.member import Member
from async_rl.pool.roster import Roster

logger = logging.getLogger(__name__)

READY_INTERVAL_S = 0.5


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
