"""The fleet of inference instances: who is in service, who gets the next group, and who takes over from a failed one.

An instance is in service while it holds the weights of the last publish. One that fails a call leaves service with the
reason, and its groups go to the others under the same request id and seed, so the same samples are drawn again and
short responses are not favoured. It comes back with the next publish; one that was only unreachable may also come back
when nobody else is left, if it still reports the version that is asked for.

Coroutines run on the producer's event loop; the plain methods are for any thread while no rollout runs.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from async_rl.client import Connections, InstanceClient
from async_rl.config import PoolSection
from async_rl.errors import ConfigError, InstanceError, InstanceRefused, InstanceUnreachable, NoInstanceLeft
from async_rl.protocol import SamplingParams
from async_rl.types import Response, WeightVersion

logger = logging.getLogger(__name__)

PROBE_INTERVAL_S = 0.5
PROBE_TIMEOUT_S = 5.0
LOG_INTERVAL_S = 10.0

BAD_REQUEST = (400, 413, 422)
"""Statuses that blame the request: every other instance would answer the same."""


@dataclass(slots=True, eq=False)
class Member:
    """One configured instance. It serves `version` while `out_of_service` (the reason) is None."""

    url: str
    client: InstanceClient
    version: WeightVersion | None = None
    out_of_service: str | None = "it has not received any weights of this run yet"
    may_return: bool = False
    """It was unreachable once since the last publish: it may come back without one; a second time it may not."""
    failed_publishes: int = 0
    """Publishes in a row that it failed."""
    outstanding_tokens: int = 0

    def serves(self, version: WeightVersion) -> bool:
        return self.out_of_service is None and self.version == version


class InferencePool:
    """The instances of `pool.instances`."""

    def __init__(self, config: PoolSection, token: str | None = None) -> None:
        if not config.instances:
            raise ConfigError("pool.instances is empty: name at least one inference instance, as http://host:port")
        urls = [url.rstrip("/") for url in config.instances]
        if len(set(urls)) != len(urls):
            raise ConfigError(f"pool.instances names an instance twice: {urls}")
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"pool.instances: {url!r} is not a base URL, expected http://host:port")
        self._config = config
        self._connections = Connections(token)
        self.members = tuple(
            Member(url, InstanceClient(self._connections, url, config.request_timeout_s)) for url in urls
        )
        """All configured instances, in service or not."""
        self._probing = asyncio.Lock()
        self.max_model_len: int | None = None
        """Prompt plus response tokens that every instance takes; known after `wait_until_ready`."""

    async def wait_until_ready(self) -> None:
        """Waits until every instance answers healthy, or until `pool.timeout_s` if at least one does.

        Raises:
            NoInstanceLeft: none was healthy in time.
        """
        deadline = time.monotonic() + self._config.timeout_s
        next_log = 0.0
        waiting = dict.fromkeys(self.members, "it was not asked yet")
        while True:
            results = await asyncio.gather(*(self._ask_ready(member) for member in waiting))
            waiting = {member: why for member, why in zip(waiting, results, strict=True) if why is not None}
            if not waiting or time.monotonic() > deadline:
                break
            if time.monotonic() >= next_log:
                next_log = time.monotonic() + LOG_INTERVAL_S
                logger.info("waiting for %s", ", ".join(member.url for member in waiting))
            await asyncio.sleep(PROBE_INTERVAL_S)
        for member, why in waiting.items():
            member.out_of_service = why
            logger.warning("going on without %s: %s", member.url, why)
        if len(waiting) == len(self.members):
            raise NoInstanceLeft(self._describe(f"no instance became healthy within {self._config.timeout_s:g} s"))

    async def generate_group(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, request_id: str, version: WeightVersion
    ) -> tuple[list[Response], int]:
        """Samples a whole group on the instance with the fewest outstanding tokens; on its failure, on another one.

        Returns:
            `sampling.n` responses with empty texts, and how often the group was sent (1 = no retry).

        Raises:
            NoInstanceLeft: every instance is out of service, and none came back within `pool.timeout_s`.
            InstanceRefused: the request itself is bad; no other instance is tried.
        """
        cost = len(prompt_token_ids) + sampling.n * sampling.max_tokens
        attempts = 0
        while True:
            member = self._least_loaded(version) or await self._wait_for_return(version)
            attempts += 1
            member.outstanding_tokens += cost
            try:
                return await member.client.generate(prompt_token_ids, sampling, request_id, version), attempts
            except InstanceError as error:
                if isinstance(error, InstanceRefused) and error.status in BAD_REQUEST:
                    raise
                # Its other groups fail too; the first reason tells the most.
                if member.out_of_service is None:
                    self.take_out(member, str(error), may_return=isinstance(error, InstanceUnreachable))
            finally:
                member.outstanding_tokens -= cost

    def take_out(self, member: Member, reason: str, *, may_return: bool = False) -> None:
        """Takes an instance out of service until the next publish."""
        member.out_of_service = reason
        # One return per publish: a flapping instance must not keep a group going round for ever.
        member.may_return = may_return and not member.may_return
        left = sum(other.out_of_service is None for other in self.members)
        logger.warning("%s leaves service, %d of %d left: %s", member.url, left, len(self.members), reason)

    def set_version(self, version: WeightVersion, urls: Collection[str]) -> None:
        """Puts exactly the instances at `urls` in service with `version`; the others keep or get a reason to be out."""
        for member in self.members:
            if member.url in urls:
                if member.out_of_service is not None and member.version is not None:
                    logger.info("%s is back in service", member.url)
                member.version, member.out_of_service, member.may_return = version, None, False
                member.failed_publishes = 0
            elif member.out_of_service is None:
                self.take_out(member, f"it did not receive weight version {version!r}")

    async def close(self) -> None:
        await self._connections.close()

    def _least_loaded(self, version: WeightVersion) -> Member | None:
        serving = [member for member in self.members if member.serves(version)]
        return min(serving, key=lambda member: member.outstanding_tokens, default=None)

    async def _wait_for_return(self, version: WeightVersion) -> Member:
        """Probes the instances that may return; one waiting group does it for all."""
        async with self._probing:
            deadline = time.monotonic() + self._config.timeout_s
            while (member := self._least_loaded(version)) is None:
                candidates = [m for m in self.members if m.may_return and m.version == version]
                if not candidates or time.monotonic() > deadline:
                    raise NoInstanceLeft(self._describe(f"no instance serves weight version {version!r} any more"))
                logger.info("no instance left; waiting for %s to return", ", ".join(m.url for m in candidates))
                await asyncio.gather(*(self._probe(member, version) for member in candidates))
                if self._least_loaded(version) is None:
                    await asyncio.sleep(PROBE_INTERVAL_S)
            return member

    async def _probe(self, member: Member, version: WeightVersion) -> None:
        try:
            await member.client.health(PROBE_TIMEOUT_S)
            actual = await member.client.weight_version(PROBE_TIMEOUT_S)
        except InstanceError as error:
            logger.debug("%s", error)
            return
        if actual == version:
            member.out_of_service = None
            logger.info("%s is back in service: it still holds weight version %s", member.url, version)
        else:
            member.may_return = False
            member.out_of_service = f"it came back with weight version {actual!r}: it needs the next publish"

    async def _ask_ready(self, member: Member) -> str | None:
        """None if the instance is healthy, else why it is not."""
        try:
            await member.client.health(PROBE_TIMEOUT_S)
            length = await member.client.max_model_len(PROBE_TIMEOUT_S)
        except InstanceError as error:
            return str(error)
        self.max_model_len = min(length, self.max_model_len or length)
        return None

    def _describe(self, what: str) -> str:
        reasons = "".join(f"\n  {member.url}: {member.out_of_service}" for member in self.members)
        return f"{what}:{reasons}\nstart or repair an instance, then start the run again"
