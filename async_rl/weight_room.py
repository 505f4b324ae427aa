"""The weight group of one trainer and a given set of instances, with the store that it meets at.

The store's server lives apart from the group's own connection to it, so that dropping it ends every member's wait at
once, on the instances as well as here.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from async_rl.config import PublishSection
from async_rl.errors import PublishError
from async_rl.fleet.member import Member
from async_rl.protocol import InitInfo
from async_rl.weight_stream import WeightGroup

COMING_TIMEOUT_S = 2.0
POLL_S = 0.01


@dataclass(slots=True)
class WeightRoom:
    """A formed group. `owners` says whose worker each rank from 1 on is."""

    server: Any
    group: WeightGroup
    owners: Mapping[int, Member]

    @property
    def members(self) -> set[Member]:
        return set(self.owners.values())

    def missing(self) -> set[Member]:
        """The instances with a worker that has not accepted the current update yet; does not wait."""
        return {self.owners[rank] for rank in self.group.missing()}


class Rendezvous:
    """The sender's side of forming a group, in a thread, because the meeting blocks and may have to be called off."""

    def __init__(self, sizes: Mapping[Member, int], config: PublishSection, backend: str) -> None:
        ends = [1 + sum(list(sizes.values())[: i + 1]) for i in range(len(sizes))]
        self._offsets = {member: end - sizes[member] for member, end in zip(sizes, ends, strict=True)}
        self._world_size = 1 + sum(sizes.values())
        self._config = config
        self._backend = backend
        self._owners = {self._offsets[member] + i: member for member, size in sizes.items() for i in range(size)}
        self._server: Any = WeightGroup.host_store(config.master_address, self._world_size, config.timeout_s)
        self._port: int = self._server.port
        self._group: WeightGroup | None = None
        self.problem = "called off"
        """Why the group could not be formed, once `wait` has returned True without a room."""
        self._ended = threading.Event()
        threading.Thread(target=self._meet, name="async-rl-rendezvous", daemon=True).start()

    def invitation(self, member: Member) -> InitInfo:
        """What `member` needs to join."""
        return InitInfo.model_validate(
            {
                "master_address": self._config.master_address,
                "master_port": self._port,
                "rank_offset": self._offsets[member],
                "world_size": self._world_size,
                "backend": self._backend,
                "bucket_bytes": self._config.bucket_bytes,
                "timeout_s": self._config.timeout_s,
            }
        )

    def wait(self, timeout_s: float) -> bool:
        """Whether the meeting has ended, one way or the other, within `timeout_s`."""
        return self._ended.wait(timeout_s)

    def call_off(self, num_absent: int) -> None:
        """Ends the wait of everybody, because `num_absent` instances will not come.

        Lets the others come first, for a short while: whoever finds no store to connect to tries until its own timeout,
        while one that waits in it notices its end at once.
        """
        deadline = time.monotonic() + COMING_TIMEOUT_S
        num_expected = self._world_size - num_absent
        # Every member that has come keeps at least one key in the store.
        while self._server.num_keys() < num_expected and time.monotonic() < deadline and not self._ended.is_set():
            time.sleep(POLL_S)
        self._server = None
        self._ended.wait(self._config.timeout_s)

    def room(self) -> WeightRoom | None:
        """The formed group, or None with `problem` set."""
        if self._group is None or self._server is None:
            return None
        return WeightRoom(self._server, self._group, self._owners)

    def _meet(self) -> None:
        config = self._config
        try:
            store = WeightGroup.join_store(config.master_address, self._port, config.timeout_s)
            self._group = WeightGroup(store, 0, self._world_size, self._backend, config.timeout_s)
        except PublishError as error:
            self.problem = str(error)
        finally:
            self._ended.set()
