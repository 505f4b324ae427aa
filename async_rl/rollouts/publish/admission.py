"""Admits instances that join after a publish: they load the current weights from its snapshot."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from async_rl.config.pool_section import PublishSection
from async_rl.errors import InstanceError, InstanceUnreachable
from async_rl.method.types import WeightVersion
from async_rl.rollouts.pool.member import Member
from async_rl.rollouts.publish.canary import Canary
from async_rl.rollouts.publish.instance_update import base_digest, put_in_service, receive
from async_rl.shared.protocol.inference import UpdateInfo


@dataclass(frozen=True, slots=True)
class Offer:
    """The version in training: what instances received, and what a late joiner reads (`info.snapshot`)."""

    version: WeightVersion
    info: UpdateInfo
    fingerprint: str
    snapshot_fingerprint: str
    names: Sequence[str] = ()
    """Of all weights, those below adapters that are published alone."""
    num_bytes: int | None = None
    """That each instance received; None where it reads the whole stream from a file."""


class Admission:
    """`LateJoiners.admit` where there are snapshots; the publisher sets `offer` before it ends a publish."""

    def __init__(self, config: PublishSection, *, takes_turns: bool = False) -> None:
        self._wakes = takes_turns
        self._timeout_s = config.timeout_s
        self._probes = config.canary != "off"
        self.offer: Offer | None = None
        self.canary: Canary | None = None
        """A late joiner of a kind of engine that it has not checked waits for the next publish."""

    async def admit(self, member: Member) -> None:
        """Loads the current weights into `member` within `publish.timeout_s`; the next publish waits for it.

        An engine that is compared with the trainer by log-probs has to wait for the next publish: the trainer computes
        log-probs with all its ranks, which is possible only between two batches.

        Raises:
            InstanceError: it cannot join before the next publish, or it failed a step.
        """
        if self.offer is None:
            raise InstanceError(f"instance {member.url} joins with the next publish: there is no weight snapshot yet")
        if self._probes and not member.client.dialect.holds_what_it_received:
            raise InstanceError(
                f"instance {member.url} joins with the next publish: its engine ({member.client.dialect.name}) is "
                "compared with the trainer then (unless publish.canary is 'off')"
            )
        if self.canary is not None and await self.canary.due(member):
            raise InstanceError(
                f"instance {member.url} joins with the next publish: it has to show then that its engine takes "
                "over every class of tensors (publish.canary)"
            )
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._load(member, self.offer)
        except TimeoutError as error:
            raise InstanceUnreachable(
                f"instance {member.url} did not load the snapshot {self.offer.info.snapshot} within "
                f"{self._timeout_s:g} s (publish.timeout_s)"
            ) from error

    async def _load(self, member: Member, offer: Offer) -> None:
        client, timeout_s, wakes = member.client, self._timeout_s, self._wakes
        if (adapter := offer.info.adapter) is not None and (
            await base_digest(client, offer.names, timeout_s) != adapter.base
        ):
            raise InstanceError(
                f"instance {member.url} joins with the next publish: the weights of its model are others than those "
                "below the trainer's adapters, and it is sent these then"
            )
        await receive(client, offer.info, timeout_s, wakes=wakes)
        has_adapters = adapter is not None
        await put_in_service(
            client, offer.snapshot_fingerprint, offer.version, timeout_s, wakes=wakes, has_adapters=has_adapters
        )
