"""The weight group of one trainer and a given set of instances, with the store of its rendezvous.

There is one more for each further pipeline stage that sends its own weights (`stages.py`). The store's server is
separate from the group's own store client, so that closing it ends every member's wait at once, on the instances as
well as here. Each instance has a secret of its own in each group, which its invitation carries.
"""

import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import accumulate

from async_rl.config.pool_section import PublishSection
from async_rl.errors import PublishError
from async_rl.shared.net.local_address import addresses_of, is_loopback
from async_rl.shared.protocol.group_errors import stood_still
from async_rl.shared.protocol.inference import InitInfo
from async_rl.shared.weights.collectives import current_device
from async_rl.shared.weights.messages import bucket_bytes_of
from async_rl.shared.weights.stages import FORMED, StageInvitation
from async_rl.shared.weights.store import StoreServer
from async_rl.shared.weights.stream import WeightGroup

COMING_TIMEOUT_S = 2.0
POLL_S = 0.01

LEAVE_IT_OUT = "leave it out, which takes the address that routes to the instances, or give one of this host"


def sender_address(master_address: str | None, routes: Sequence[str], of_stages: Sequence[str] = ()) -> str:
    """The address of this host at which all instances can reach it, and each other.

    All members of a group connect to all others, so they use one address, which is not loopback if an instance is on
    another host: instances on this host can reach it as well.

    Args:
        master_address: the configured address, an address or a name of this host.
        routes: for each instance, the source address of this host's route to it.
        of_stages: the same for further senders. They reach the instances, which may not reach the trainer's network.

    Raises:
        PublishError: the configured address is not reachable for all instances.
    """
    elsewhere = ([address for address in each if not is_loopback(address)] for each in (routes, of_stages))
    remote = next(filter(None, elsewhere), [])
    if master_address is None:
        return Counter(remote or routes).most_common(1)[0][0]
    try:
        chosen = str(addresses_of(master_address, None, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise PublishError(f"publish.master_address = {master_address!r}: {error}; {LEAVE_IT_OUT}") from error
    if remote and is_loopback(chosen):
        raise PublishError(
            f"publish.master_address = {master_address!r} is {chosen} on this host, where nobody else reaches it, but "
            f"the way to an instance or another stage begins at {remote[0]}: {LEAVE_IT_OUT}"
        )
    return chosen


class Rendezvous:
    """The sender's side of forming a group, in a thread, because the rendezvous blocks and may have to be cancelled."""

    def __init__(
        self, sizes: Sequence[int], address: str, config: PublishSection, backend: str, num_stages: int = 1
    ) -> None:
        """`address` is this host's own, see `sender_address`; `sizes` are the instances' numbers of workers."""
        *self._offsets, self._world_size = accumulate(sizes, initial=1)
        self._address = address
        self._config = config
        self._backend = backend
        self._secrets = [secrets.token_hex() for _ in sizes]
        self._secrets_of_stages = [secrets.token_hex() for _ in range(1, num_stages)]
        of_ranks = [secret for secret, size in zip(self._secrets, sizes, strict=True) for _ in range(size)]
        self._servers = [StoreServer(address, of_ranks, sender) for sender in (None, *self._secrets_of_stages)]
        """The first is of this process's own group. Members come to one after the other."""
        self._num_reached = 1
        """To so many of them members may have come: all groups before are formed."""
        self.group: WeightGroup | None = None
        """The group, once it is formed and until `close`."""
        self._problem = "called off"
        self._device = current_device(backend)
        self._ended = threading.Event()
        threading.Thread(target=self._meet, name="async-rl-rendezvous", daemon=True).start()

    def invitations(self) -> list[InitInfo]:
        """The parameters with which each instance joins."""
        config = self._config
        return [
            InitInfo.model_validate(
                {
                    "master_address": self._address,
                    "master_port": self._servers[0].port,
                    "secret": secret,
                    "rank_offset": offset,
                    "world_size": self._world_size,
                    "backend": self._backend,
                    "bucket_bytes": bucket_bytes_of(self._backend),
                    "timeout_s": config.timeout_s,
                    "stage_ports": [server.port for server in self._servers[1:]],
                }
            )
            for secret, offset in zip(self._secrets, self._offsets, strict=True)
        ]

    def stage_invitations(self) -> list[StageInvitation]:
        """Those of the further stages' senders."""
        common = self._world_size, self._backend, self._config.timeout_s
        return [
            StageInvitation(self._address, server.port, secret, *common, patience_s=number * self._config.timeout_s)
            for number, (server, secret) in enumerate(
                zip(self._servers[1:], self._secrets_of_stages, strict=True), start=2
            )
        ]

    def wait(self, timeout_s: float) -> bool:
        """Whether the rendezvous has ended, with or without a group, within `timeout_s`."""
        return self._ended.wait(timeout_s)

    @property
    def problem(self) -> str | None:
        """Why it has ended without a group."""
        return self._problem if self._ended.is_set() and self.group is None else None

    def absent(self) -> list[int]:
        """The ranks that have not come yet. One that has come counts as present also after its end."""
        store = self._reached[-1].store(self._config.timeout_s)
        return [rank for rank in range(1, self._world_size) if not WeightGroup.has_come(store, rank)]

    def late(self) -> list[int]:
        """The ranks whose members came when another had come and gone, or the sender had given up."""
        return [rank for server in self._reached for rank in server.late if rank]

    def lost(self) -> list[int]:
        """The ranks whose members have come and ended their connection, the first one first."""
        # Who leaves one group leaves all.
        return list(dict.fromkeys(rank for server in self._reached for rank in server.ended if rank))

    def call_off(self, without: Collection[int]) -> str:
        """Ends the wait of all members, because it failed or the ranks `without` will not join; returns why.

        First lets the others connect, for a short while: an instance that finds no store retries until its own timeout,
        while one that waits in the store notices its end at once.
        """
        deadline = time.monotonic() + COMING_TIMEOUT_S
        while set(self.absent()).difference(without) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._close_servers()
        self._ended.wait(self._config.timeout_s)
        self.close()
        return self._problem

    def close(self) -> None:
        """Ends the group for every member; a second call does nothing."""
        group, self.group = self.group, None
        if group is not None:
            group.close()
        self._close_servers()

    @property
    def _reached(self) -> list[StoreServer]:
        return self._servers[: self._num_reached]

    def _close_servers(self) -> None:
        for server in self._servers:
            server.close()

    def _meet(self) -> None:
        config = self._config
        try:
            store = self._servers[0].store(config.timeout_s)
            group = WeightGroup(store, 0, self._world_size, self._backend, config.timeout_s, self._device)
            try:
                self._await_stages()
            except PublishError:
                group.close()
                raise
            self.group = group
        except PublishError as error:
            for server in self._servers:
                server.has_lost = True
            self._problem = str(error)
        finally:
            self._ended.set()

    def _await_stages(self) -> None:
        """Returns when the further stages' groups are formed, too.

        Raises:
            PublishError: one of them was not within the timeout, or its sender has given it up.
        """
        for number, server in enumerate(self._servers[1:], start=1):
            self._num_reached = number + 1
            deadline = time.monotonic() + self._config.timeout_s
            store = server.store(self._config.timeout_s)
            while not store.check([FORMED]):
                if store.has_ended() or 0 in server.ended or time.monotonic() > deadline:
                    timeout_s = self._config.timeout_s
                    # The trainer's own fault, as if this rank had stood still.
                    said, came = stood_still(timeout_s), "did not come"
                    if WeightGroup.has_come(store, 0):
                        said, came = "", "came"
                    raise PublishError(
                        f"{said}the weight group of pipeline stage {number} was not formed within {timeout_s:g} s, and "
                        f"its first rank {came} to it at {self._address}: the log of that rank says more"
                    )
                time.sleep(POLL_S)
