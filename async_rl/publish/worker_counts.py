"""How many workers the instances have, which `Publication` reports; asked once of each of their processes."""

from collections.abc import Sequence

from async_rl.event_loop import EventLoopThread
from async_rl.pool.member import Member
from async_rl.pool.membership import BootId
from async_rl.publish.instance_calls import InstanceCalls

TIMEOUT_S = 3.0
"""A figure of the records is not worth a longer wait."""


class WorkerCounts:
    """Called by `publisher`, from the main thread."""

    def __init__(self, loop: EventLoopThread) -> None:
        self._loop = loop
        self._known: dict[tuple[Member, BootId], int] = {}

    def total(self, members: Sequence[Member]) -> int | None:
        """Of all `members` together; None if one of them does not say."""
        keys = {member: (member, member.boot_id) for member in members}
        unknown = [member for member, key in keys.items() if key not in self._known]
        if unknown:
            calls = InstanceCalls(self._loop, unknown, lambda member: member.client.world_size(TIMEOUT_S))
            calls.settle(TIMEOUT_S)
            self._known |= {keys[member]: size for member, size in calls.results().items()}
        self._known = {key: self._known[key] for key in keys.values() if key in self._known}
        return sum(self._known.values()) if len(self._known) == len(keys) else None
