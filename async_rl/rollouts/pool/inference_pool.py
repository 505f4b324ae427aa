"""The pool of inference instances: in service with one weight version, generating whole groups.

An instance is ready while it holds the weights of the last publish. One that fails a request is tried again after a
pause; one whose response shows that it must not serve is out of service until the next publish; one that was only
unreachable may return earlier, if it is the same process with the same weights. New instances join at the next
publish, or at once.

Everything runs on the producer's event loop; `members` may be read from any thread.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence

from async_rl.config.pool_section import PoolSection
from async_rl.errors import ConfigError, ConnectionLost, InstanceError, InstanceUnreachable
from async_rl.method.types import Response, WeightVersion
from async_rl.rollouts.pool.group_rollout import GroupRollout
from async_rl.rollouts.pool.health import HealthWatch, wait_until_healthy
from async_rl.rollouts.pool.late_joiners import LateJoiners
from async_rl.rollouts.pool.member import Member
from async_rl.rollouts.pool.membership import BootId
from async_rl.rollouts.pool.roster import HOLDING_TIMEOUT_S, Roster
from async_rl.rollouts.pool.router import Cached
from async_rl.shared.protocol.inference import SamplingParams

logger = logging.getLogger(__name__)

OUT_OF_SERVICE_TIMEOUT_S = 5.0
"""For the sleep of an instance that may not be there."""


class InferencePool(Roster):
    """The instances of a run, as its rollouts and publishes use them."""

    def __init__(
        self, config: PoolSection, token: str | None = None, term: str | None = None, *, takes_turns: bool = False
    ) -> None:
        """`token` is the bearer token of the instances, `term` the trainer's lease on its run (`RUN_UID:TERM`).

        `takes_turns`: whether the instances have the trainer's own devices, and are to `sleep` while it trains.

        Raises:
            ConfigError: an invalid address, or no way to find any instance.
        """
        if not (config.instances or config.fleet_port):
            raise ConfigError(
                "pool.instances is empty: name at least one inference instance, as http://host:port or "
                "dns:host:port, or set the port in pool.fleet_address for instances that register themselves"
            )
        super().__init__(config, token, term)
        self.late_joiners = LateJoiners(self)
        self._health = HealthWatch(self, self.late_joiners, config)
        self._departed: dict[str, Member] | None = {} if takes_turns else None
        """Those that have left the pool since the last sleep, by URL, and may still have their devices' memory."""
        self.max_model_len: int | None = None
        """Prompt plus response tokens that every instance accepts; known after `wait_until_ready`."""
        for url in config.urls:
            self.add(url)

    @property
    def is_open(self) -> bool:
        """Whether instances are expected to come by themselves: found by name, or registered at a known port."""
        return bool(self._config.dns_names or self._config.fleet_port)

    @property
    def is_idle(self) -> bool:
        """Whether no request is running."""
        return not self.router.is_waited_for and not any(member.outstanding_tokens for member in self.members)

    # Publishing

    async def begin_publish(self) -> list[Member]:
        """Ends the service of the present version; returns the instances that may receive the next one.

        Waits for an instance that is being admitted: two updates must not overlap.
        """
        self._membership.begin_publish()
        self.late_joiners.is_closed = False
        await self.late_joiners.wait()
        # Failures during the wait belong to the previous version.
        self._membership.begin_publish()
        return [member for member in self.members if self._may_receive(member)]

    def _may_receive(self, member: Member) -> bool:
        if (duplicate := self.duplicate_of(member)) is not None:
            self.note_useless(member, f"it is the same process as {duplicate.url}: name one of the addresses")
            return False
        return self._membership.may_receive(member.entry)

    async def end_publish(
        self, version: WeightVersion, urls: Collection[str], known: Mapping[str, BootId] | None = None
    ) -> None:
        """Puts exactly the instances at `urls` in service with `version`; the others keep or get a reason to be out.
        Each is queried once more for the version and the process: a restarted one is left out. Except for those `known`
        by the boot id of the process that has just said that it holds the version."""
        receivers = [member for member in self.members if member.url in urls]
        known = known or {}
        asked = (self._ask_holding(member, version, known.get(member.url)) for member in receivers)
        holders = dict(await asyncio.gather(*asked))
        present = self.members
        transitions = self._membership.end_publish(version, [m.entry for m in present], holders)
        for member, transition in zip(present, transitions, strict=True):
            if transition.before not in ("ready", "joining") and transition.after == "ready":
                logger.info("%s is back in service", member.url)
            if transition.after == "ready":
                member.last_seen_s = time.monotonic()
            self._act(member, transition)

    async def _ask_holding(self, member: Member, version: WeightVersion, known: BootId) -> tuple[str, BootId]:
        """URL and boot id of an instance that holds `version`; an empty URL for one that does not."""
        if known is not None and member.state == "ready":
            return member.url, known
        try:
            if member.state != "ready":
                # It may have joined during the publish.
                await self.get_to_know(member, HOLDING_TIMEOUT_S)
            held = await member.client.holding(HOLDING_TIMEOUT_S)
        except InstanceError as error:
            self.note_failure(member, str(error))
            return "", None
        if held.version != version:
            self.note_failure(member, f"it holds weight version {held.version!r} after {version!r} was published")
            return "", None
        return member.url, held.boot_id

    async def sleep(self, timeout_s: float) -> dict[Member, InstanceError]:
        """Has all instances give up their devices' memory until the next publish; nobody joins before it.

        One that does not is out of service, with the reason. Those that are out of service already may be awake, too,
        and those that have left the pool: each of these is asked until it sleeps, or no process is there.

        Returns:
            The errors of those that may keep memory: a process is there, and is not asleep.
        """
        awake: dict[Member, InstanceError] = {}

        async def put_to_sleep(member: Member) -> None:
            # One that joins may be putting itself to sleep.
            patience_s = timeout_s if member.state in ("ready", "joining") else OUT_OF_SERVICE_TIMEOUT_S
            try:
                await member.client.sleep(min(timeout_s, patience_s))
            except InstanceError as error:
                # Without a connection there is no process, or it is being started. One that refuses and has not served
                # may be of a kind that cannot sleep: a publish names it.
                is_there = not isinstance(error, ConnectionLost)
                if is_there and (member.version is not None or isinstance(error, InstanceUnreachable)):
                    awake[member] = error
                if member.state == "ready":
                    self.note_failure(member, f"it did not go to sleep: {error}")

        self.late_joiners.is_closed = True
        await self.late_joiners.wait()
        departed, self._departed = self._departed or {}, {}
        present = departed | {member.url: member for member in self.members}
        await asyncio.gather(*map(put_to_sleep, present.values()))
        self._departed |= {url: member for url, member in departed.items() if member in awake}
        return awake

    def _drop(self, member: Member, reason: str) -> None:
        super()._drop(member, reason)
        if self._departed is not None:
            self._departed[member.url] = member

    # Rollouts

    async def generate_group(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        version: WeightVersion,
        expected_tokens: float | None = None,
        cached: Cached | None = None,
    ) -> tuple[list[Response], int]:
        """Samples a whole group; responses that an instance leaves unfinished are continued by another one.

        Args:
            expected_tokens: of one response; by default the maximum.
            cached: where the turn before was generated, if the prompt begins with one.

        Returns:
            `sampling.n` responses with empty texts, and the number of attempts (1 = nothing failed).

        Raises:
            NoInstanceLeft: no instance is in service, and none returned or joined within `pool.timeout_s`.
            InstanceRefused: the request itself is invalid; no other instance is tried.
            PromptFailed: several instances in turn failed at it.
        """
        expected = sampling.max_tokens if expected_tokens is None else expected_tokens
        if self.model_tokens is not None:
            sampling = self.model_tokens.completed(sampling)
        return await GroupRollout(self, prompt_token_ids, sampling, request_id, version, expected, cached).run()

    # Life

    async def wait_until_ready(self, *, publishes: bool = True) -> None:
        """Waits until every instance is healthy, or until `pool.timeout_s` if at least one is; then watches them.

        `publishes`: whether complete weights follow, which also repair an instance with an incomplete update.

        Raises:
            NoInstanceLeft: none was healthy in time.
        """
        length = await wait_until_healthy(self, self._config.timeout_s, publishes=publishes)
        self.max_model_len = min(length, self.max_model_len or length)
        self._health.start()

    async def close(self) -> None:
        await self._health.stop()
        await self._connections.close()
