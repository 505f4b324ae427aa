"""The pool of inference instances: who belongs to it, who is in service, who gets the next group, who takes over.

An instance is ready while it holds the weights of the last publish. One that fails a call leaves service with the
reason, and what it had begun goes on at others. It comes back with the next publish; one that was only unreachable may
come back before, if it still reports the version in training. New instances join at the next publish, or at once.

Everything runs on the producer's event loop; `members` may be read from any thread.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from async_rl.client import Connections, InstanceClient
from async_rl.config import PoolSection
from async_rl.errors import ConfigError, InstanceError, NoInstanceLeft, UnknownInstance
from async_rl.fleet.group_rollout import GroupRollout
from async_rl.fleet.member import Member
from async_rl.fleet.router import Router
from async_rl.fleet.watch import LOG_INTERVAL_S, PROBE_TIMEOUT_S, REMEDY, Watch
from async_rl.protocol import BaseUrl, InstanceInfo, InstanceState, SamplingParams
from async_rl.types import Response, WeightVersion

logger = logging.getLogger(__name__)

_BASE_URL = TypeAdapter(BaseUrl)

READY_INTERVAL_S = 0.5

ALIVE_S = 3.0
"""An instance that answered so recently has not been replaced by another one."""

MAX_FAILED_PUBLISHES = 3
"""An instance that failed so many publishes in a row is not asked again: it would slow down every further one."""


class InferencePool:
    """The instances of a run, as one leader sees them."""

    def __init__(self, config: PoolSection, token: str | None = None) -> None:
        """`token` is the bearer token of the instances.

        Raises:
            ConfigError: an address that cannot work, or no way for any instance to be found.
        """
        if not (config.instances or config.dns or config.fleet_port):
            raise ConfigError(
                "pool.instances is empty: name at least one inference instance, as http://host:port, or set pool.dns, "
                "or pool.fleet_port for instances that register themselves"
            )
        self._config = config
        self._connections = Connections(token)
        self._left: dict[str, str | None] = {}
        self._admissions: set[asyncio.Task[None]] = set()
        self.members: tuple[Member, ...] = ()
        self.version: WeightVersion | None = None
        """What is in training; None before the first publish and while one goes on."""
        self.max_model_len: int | None = None
        """Prompt plus response tokens that every instance takes; known after `wait_until_ready`."""
        self.min_model_len = 0
        """What an instance must take to be of use; others that come later stay out of service."""
        self.admit: Callable[[Member], Awaitable[None]] | None = None
        """Loads the weights in training into an instance; raises InstanceError. Where it is None, nobody joins between
        two publishes."""
        self.router = Router(lambda: self.members, config.max_outstanding_tokens, config.split_tail)
        self._watch = Watch(self, config)
        for url in config.instances:
            self.add(url)

    @property
    def can_admit(self) -> bool:
        return self._config.join == "now" and self.admit is not None

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way, those of other leaders included."""
        return not self.router.is_waited_for and not any(
            member.outstanding_tokens or member.outstanding_elsewhere for member in self.members
        )

    def infos(self) -> list[InstanceInfo]:
        return [member.info() for member in self.members]

    def find(self, name: str) -> Member:
        """The instance of that name or URL.

        Raises:
            UnknownInstance: there is none.
        """
        for member in self.members:
            if name in (member.name, member.url):
                return member
        known = ", ".join(member.name for member in self.members) or "none"
        raise UnknownInstance(f"the fleet has no instance {name!r}: it has {known}")

    # Membership

    def add(self, url: str, name: str | None = None, boot_id: str | None = None) -> Member:
        """Takes in an instance; it gets weights with the next publish, or at once.

        Raises:
            ConfigError: the URL is none, or it or the name is taken.
        """
        url = url.rstrip("/")
        try:
            _BASE_URL.validate_python(url)
        except ValidationError as error:
            raise ConfigError(f"{url!r} is not a base URL of an instance, expected http://host:port") from error
        name = name or urlsplit(url).netloc
        for other in self.members:
            if other.url == url:
                raise ConfigError(f"the pool has an instance at {url} twice: as {other.name!r} already")
            if other.name == name:
                raise ConfigError(
                    f"the pool has an instance called {name!r} already, at {other.url}: choose another name"
                )
        client = InstanceClient(self._connections, url, self._config.request_timeout_s, self._config.stream_interval)
        member = Member(name, url, client, boot_id=boot_id)
        self._left.pop(name, None)
        self.members = (*self.members, member)
        self._watch.follow(member)
        return member

    def register(self, url: str, name: str, boot_id: str) -> Member | None:
        """An instance says that it is there; None if it was drained or removed since it started, and may end.

        Raises:
            ConfigError: its URL or name belongs to another instance.
        """
        url = url.rstrip("/")
        if name in self._left and self._left[name] in (None, boot_id):
            # From now on the bar is this process's alone.
            self._left[name] = boot_id
            return None
        known = next((member for member in self.members if member.name == name or member.url == url), None)
        if known is None:
            logger.info("%s joins the fleet, at %s", name, url)
            return self.add(url, name, boot_id)
        if known.url != url and time.monotonic() - known.last_seen_s < ALIVE_S:
            raise ConfigError(
                f"the pool has an instance called {known.name!r} already, which answers at {known.url}: "
                "choose another --name"
            )
        if known.url != url or known.boot_id not in (None, boot_id):
            # A new process: its weights are gone, and so is all that it had begun.
            self._drop(known, f"it was started anew, at {url}")
            return self.add(url, name, boot_id)
        # It may have been known by its address only.
        known.name, known.boot_id = name, boot_id
        return known

    def drain(self, name: str) -> Member:
        """Gives an instance nothing new; it leaves the pool when it has finished what it has.

        Raises:
            UnknownInstance: there is none of that name or URL.
        """
        member = self.find(name)
        member.state, member.reason = "draining", "it finishes what it has"
        self.router.wake()
        return member

    def remove(self, name: str) -> Member:
        """Drops an instance at once; what it has begun goes on at others.

        Raises:
            UnknownInstance: there is none of that name or URL.
        """
        member = self.find(name)
        self._left[member.name] = member.boot_id
        self._drop(member, "it was removed from the pool")
        return member

    def _drop(self, member: Member, reason: str) -> None:
        self.members = tuple(other for other in self.members if other is not member)
        self._lose(member, reason)

    def _lose(self, member: Member, reason: str) -> None:
        """What it had begun goes on elsewhere. One that drains stays so and leaves the pool."""
        if member.state != "draining":
            member.state, member.reason = "dead", reason
        for request in list(member.requests):
            request.cancel()

    # Service

    def take_out(self, member: Member, reason: str, *, state: InstanceState = "stale") -> None:
        """Takes an instance out of service: until it answers again if it is "dead", else until the next publish."""
        was_in_service = member.state in ("ready", "draining")
        if state == "dead":
            self._lose(member, reason)
        elif member.state != "draining":
            member.state, member.reason, member.is_barred = state, reason, True
        if was_in_service:
            left = sum(other.state == "ready" for other in self.members)
            logger.warning("%s leaves service, %d of %d left: %s", member.url, left, len(self.members), reason)

    def bring_back(self, member: Member) -> None:
        """An instance that still holds the weights in training serves again."""
        logger.info("%s is back in service: it holds weight version %s", member.url, self.version)
        self._put_in_service(member, self.version)

    async def admit_now(self, member: Member) -> None:
        """Loads the weights in training into an instance and puts it in service.

        Raises:
            InstanceError: why that failed.
        """
        assert self.admit is not None, "asked to admit without a way to"
        this_task = asyncio.current_task()
        assert this_task is not None
        version = self.version
        self._admissions.add(this_task)
        try:
            await self.admit(member)
        finally:
            self._admissions.discard(this_task)
        if self.version == version and member in self.members and member.state != "draining":
            logger.info("%s joins in the middle of a period with weight version %s", member.url, version)
            self._put_in_service(member, version)

    async def begin_publish(self) -> list[Member]:
        """Ends the service of the present version; the instances that may receive the next one.

        Waits for an instance that is just being admitted: two updates must not meet.
        """
        self.version = None
        while self._admissions:
            await asyncio.sleep(READY_INTERVAL_S / 10)
        for member in self.members:
            member.is_barred = False
        return [
            member
            for member in self.members
            if member.state != "draining" and member.failed_publishes < MAX_FAILED_PUBLISHES
        ]

    async def end_publish(self, version: WeightVersion, urls: Collection[str]) -> None:
        """Puts exactly the instances at `urls` in service with `version`; the others keep or get a reason to be out."""
        self.version = version
        for member in self.members:
            member.num_returns = 0
            if member.state == "draining":
                continue
            # Who says that it holds this version, but is not among these, failed a check of the publish.
            member.is_barred = member.url not in urls and (member.is_barred or not self.can_admit)
            if member.url in urls:
                if member.state != "ready" and member.version is not None:
                    logger.info("%s is back in service", member.url)
                member.failed_publishes = 0
                self._put_in_service(member, version)
            elif member.state == "ready":
                self.take_out(member, f"it did not receive weight version {version!r}")
        self.router.wake()

    def _put_in_service(self, member: Member, version: WeightVersion | None) -> None:
        member.state, member.reason, member.version = "ready", None, version
        member.last_seen_s = time.monotonic()
        self.router.wake()

    # Rollouts

    async def generate_group(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        version: WeightVersion,
        expected_tokens: float | None = None,
    ) -> tuple[list[Response], int]:
        """Samples a whole group; what an instance leaves unfinished goes on at another one.

        Args:
            expected_tokens: of one response; by default the most it may have.

        Returns:
            `sampling.n` responses with empty texts, and the number of attempts (1 = nothing failed).

        Raises:
            NoInstanceLeft: no instance is in service, and none came back or joined within `pool.timeout_s`.
            InstanceRefused: the request itself is bad; no other instance is tried.
        """
        expected = sampling.max_tokens if expected_tokens is None else expected_tokens
        return await GroupRollout(self, prompt_token_ids, sampling, request_id, version, expected).run()

    # Life

    async def wait_until_ready(self) -> None:
        """Waits until every instance answers healthy, or until `pool.timeout_s` if one does; then watches them.

        Raises:
            NoInstanceLeft: none was healthy in time.
        """
        deadline = time.monotonic() + self._config.timeout_s
        next_log = 0.0
        healthy: dict[Member, None] = {}
        while True:
            waiting = [member for member in self.members if member not in healthy]
            results = await asyncio.gather(*(self._ask_ready(member) for member in waiting))
            healthy |= dict.fromkeys(m for m, is_ready in zip(waiting, results, strict=True) if is_ready)
            waiting = [member for member in self.members if member not in healthy]
            if (healthy and not waiting) or time.monotonic() > deadline:
                break
            if time.monotonic() >= next_log:
                next_log = time.monotonic() + LOG_INTERVAL_S
                logger.info("waiting for %s", ", ".join(m.url for m in waiting) or "an instance to register")
            await asyncio.sleep(READY_INTERVAL_S)
        for member in waiting:
            logger.warning("going on without %s: %s", member.url, member.reason)
        if not healthy:
            what = f"no instance became healthy within {self._config.timeout_s:g} s"
            raise NoInstanceLeft(f"{self.describe(what)}\n{REMEDY}")
        self._watch.start()

    async def close(self) -> None:
        await self._watch.stop()
        await self._connections.close()

    def require_length(self, member: Member, max_model_len: int) -> None:
        """Raises InstanceError for an instance that came later and is too small for this run."""
        if max_model_len < self.min_model_len:
            member.reason = f"its model takes {max_model_len} tokens, this run needs {self.min_model_len}"
            raise InstanceError(f"instance {member.url}: {member.reason}")

    def describe(self, what: str) -> str:
        """`what`, and why no instance helps."""
        reasons = "".join(f"\n  {member.url}: {member.reason}" for member in self.members)
        return f"{what}:{reasons or ' the pool is empty'}"

    async def _ask_ready(self, member: Member) -> bool:
        try:
            await member.client.health(PROBE_TIMEOUT_S)
            await member.client.learn_dialect(PROBE_TIMEOUT_S)
            length = await member.client.max_model_len(PROBE_TIMEOUT_S)
        except InstanceError as error:
            member.reason = str(error)
            return False
        member.last_seen_s = time.monotonic()
        self.max_model_len = min(length, self.max_model_len or length)
        return True
