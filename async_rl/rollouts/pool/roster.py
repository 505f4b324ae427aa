"""The instances of a pool and their known state: which belong to it, and the consequences of each fact about them.

`membership.py` decides from a fact which instances are in service; this module acts on the decision: it gives up
requests, wakes the router, logs. Health checks, running groups and publishes report their facts here, and nothing in
here waits for them. Everything runs on the producer's event loop; `members` may be read from any thread.
"""

import logging
import time
from typing import Literal
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from async_rl.config.pool_section import PoolSection
from async_rl.errors import (
    BrokenAnswer,
    ConfigError,
    ConnectionLost,
    InstanceError,
    InstanceRefused,
    InstanceRestarted,
    InstanceStalled,
    InstanceTooSlow,
    StaleWeights,
    UnknownInstance,
)
from async_rl.method.types import WeightVersion
from async_rl.rollouts.instance.client import InstanceClient
from async_rl.rollouts.instance.connections import Connections
from async_rl.rollouts.instance.http import STARTED
from async_rl.rollouts.instance.model_tokens import ModelTokens
from async_rl.rollouts.pool.member import Member
from async_rl.rollouts.pool.membership import Event, InstanceEntry, Membership, Transition
from async_rl.rollouts.pool.router import Router
from async_rl.shared.protocol.body import BaseUrl
from async_rl.shared.protocol.fleet import InstanceInfo

logger = logging.getLogger(__name__)

Blame = Literal["none", "pause", "lost", "barred"]
"""none: it is slow; pause: the fault may be temporary, as most are; lost: it generates no tokens; barred: it must not
serve this version."""

TRANSIENT = (408, 425, 429)
"""Statuses below 500 that mean only that the instance is busy."""


_BASE_URL = TypeAdapter(BaseUrl)

ALIVE_S = 3.0
"""An instance that responded this recently has not been replaced by another one."""

MAX_DESCRIBED = 20

HOLDING_TIMEOUT_S = 5.0
"""For an instance to report, at the end of a publish, the version it holds and its process."""


class Roster:
    """The instances of a run."""

    def __init__(self, config: PoolSection, token: str | None, term: str | None = None) -> None:
        """`token` is the bearer token of the instances, `term` the trainer's lease on its run (`RUN_UID:TERM`)."""
        self._config = config
        self._connections = Connections(token, term)
        self._left: dict[str, str | None] = {}
        self._replaced: set[str] = set()
        """Boot ids of processes whose place another process has taken."""
        self._membership = Membership()
        self.members: tuple[Member, ...] = ()
        self.min_model_len = 0
        """The length that an instance must accept; smaller ones that join later stay out of service."""
        self.model_tokens: ModelTokens | None = None
        """What responses are compared with, and what else ends them; None before it is set."""
        self.router = Router(lambda: self.members)

    @property
    def version(self) -> WeightVersion | None:
        """The version in training; None before the first publish and during one."""
        return self._membership.version

    @property
    def can_return(self) -> bool:
        """Whether any instance may return before the next publish."""
        return self._membership.can_return(member.entry for member in self.members)

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

    def duplicate_of(self, member: Member) -> Member | None:
        """An instance before it that is the same process, at another address. Start times tell nothing: several
        processes may have been started at the same moment."""
        if member.boot_id is None or member.boot_id.startswith(STARTED):
            return None
        earlier = self.members[: self.members.index(member)] if member in self.members else ()
        return next((other for other in earlier if other.boot_id == member.boot_id and other.state != "dead"), None)

    def describe(self, what: str) -> str:
        """`what`, and why each instance is out of service; of a large pool the first ones."""
        reasons = [
            f"\n  {member.url}: {member.reason or member.circuit.reason}" for member in self.members[:MAX_DESCRIBED]
        ]
        if (num_more := len(self.members) - len(reasons)) > 0:
            reasons.append(f"\n  and {num_more} more")
        if not reasons:
            reasons = [" the pool is empty"]
            if self._left:
                reasons.append(f"; async-rl fleet add takes back what was drained or removed: {', '.join(self._left)}")
        return f"{what}:{''.join(reasons)}"

    # Membership

    def add(self, url: str, name: str | None = None, boot_id: str | None = None) -> Member:
        """Adds an instance; it gets weights with the next publish, or at once.

        Raises:
            ConfigError: the URL is invalid, or it or the name is already in use.
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
        client = InstanceClient(self._connections, url, self._config.request_timeout_s)
        member = Member(name, client, InstanceEntry(url, boot_id))
        self._left.pop(name, None)
        self.members = (*self.members, member)
        return member

    def register(self, url: str, name: str, boot_id: str) -> Member | None:
        """Handles an instance's heartbeat; None if it may end: it was drained or removed since it started, or another
        process has taken its name or its address while it was away.

        Raises:
            ConfigError: its URL or name belongs to another instance.
        """
        url = url.rstrip("/")
        if boot_id in self._replaced:
            return None
        if name in self._left and self._left[name] in (None, boot_id):
            # From now on the bar applies to this process only.
            self._left[name] = boot_id
            return None
        self._require_free(name, url)
        known = next((member for member in self.members if member.url == url), None)
        if known is None:
            logger.info("%s joins the fleet, at %s", name, url)
            return self.add(url, name, boot_id)
        if known.entry.registered_as not in (None, boot_id):
            # A new process: its weights and running requests are lost.
            self._replace(known, f"it was started anew, at {url}")
            return self.add(url, name, boot_id)
        # It may have been known by its address only.
        known.name = name
        self._membership.registered(known.entry, boot_id)
        return known

    def _require_free(self, name: str, url: str) -> None:
        """Takes the name from an instance at another address that does not respond any more.

        Raises:
            ConfigError: it does respond: there would be two of that name.
        """
        owner = next((member for member in self.members if member.name == name and member.url != url), None)
        if owner is None:
            return
        if time.monotonic() - owner.last_seen_s < ALIVE_S:
            raise ConfigError(
                f"the pool has an instance called {name!r} already, which answers at {owner.url}: choose another --name"
            )
        self._replace(owner, f"another instance, at {url}, has taken its name")

    def _replace(self, member: Member, reason: str) -> None:
        """Drops an instance whose place another process takes; if it was only cut off, it ends when it returns."""
        if member.entry.registered_as is not None:
            self._replaced.add(member.entry.registered_as)
        self._drop(member, reason)

    def drain(self, name: str) -> Member:
        """Gives an instance no new requests; it leaves the pool when its running ones have finished.

        Raises:
            UnknownInstance: there is none of that name or URL.
        """
        member = self.find(name)
        self._act(member, self._membership.drained(member.entry))
        return member

    def is_drained(self, member: Member) -> bool:
        """Whether it drains, and has no request any more."""
        return member.state == "draining" and not member.outstanding_tokens

    def remove(self, name: str) -> Member:
        """Drops an instance at once; its running requests are continued by other instances.

        Raises:
            UnknownInstance: there is none of that name or URL.
        """
        member = self.find(name)
        self._left[member.name] = member.entry.registered_as
        self._drop(member, "it was removed from the pool")
        return member

    def bar(self, name: str, url: str, boot_id: str | None) -> None:
        """An instance had been drained or removed when this pool was made; see `register`."""
        for member in self.members:
            if member.url == url:
                self._drop(member, "it was removed from the pool")
        self._left[name] = boot_id

    def _drop(self, member: Member, reason: str) -> None:
        self.members = tuple(other for other in self.members if other is not member)
        self._act(member, self._membership.removed(member.entry, reason))

    def _act(self, member: Member, transition: Transition) -> None:
        """Applies the consequences of a transition."""
        if transition.ends_requests:
            for request in list(member.requests):
                request.cancel()
        if transition.after == "ready" and transition.event in (Event.RECEIVED, Event.RETURNED):
            member.circuit.reset()
        if transition.before == "ready" and transition.after in ("stale", "dead", "joining"):
            left = sum(other.state == "ready" for other in self.members)
            logger.warning("%s leaves service, %d of %d left: %s", member.url, left, len(self.members), member.reason)
        self.router.wake()

    # Facts about an instance

    def note_answer(self, member: Member, version: WeightVersion, boot_id: str | None) -> None:
        """It reports the weights it holds and its process; it may return to service by that."""
        transition = self._membership.answered(member.entry, version, boot_id)
        if transition.after == "ready" and transition.before != "ready":
            logger.info("%s is back in service: it holds weight version %s", member.url, version)
        self._act(member, transition)

    def note_process(self, member: Member, boot_id: str | None) -> None:
        """It responded as this process, which may be another one than before."""
        if (transition := self._membership.seen(member.entry, boot_id)) is not None:
            self._act(member, transition)

    def note_unwell(self, member: Member, reason: str) -> None:
        """Its health check has failed for too long, but it responds."""
        self._act(member, self._membership.unwell(member.entry, reason))

    def note_lost(self, member: Member, reason: str) -> None:
        """It does not respond: other instances continue its requests, until it responds again."""
        self._act(member, self._membership.lost(member.entry, reason))

    def note_useless(self, member: Member, reason: str) -> None:
        """It responds, but cannot serve this run in its present state."""
        self._act(member, self._membership.useless(member.entry, reason))

    def note_failure(self, member: Member, reason: str) -> None:
        """It must not serve the version in training: it is out until the next publish."""
        self._act(member, self._membership.failed(member.entry, reason))

    def may_be_admitted(self, member: Member) -> bool:
        """Whether it may be put in service between two publishes, once it holds the weights in training."""
        return self._membership.may_be_admitted(member.entry) and self.duplicate_of(member) is None

    def note_admitted(self, member: Member, version: WeightVersion, boot_id: str | None) -> None:
        """This process received the weights in training; it serves, unless a publish has begun meanwhile."""
        transition = self._membership.admitted(member.entry, version, boot_id)
        if transition is not None:
            logger.info("%s joins in the middle of a period with weight version %s", member.url, version)
            member.last_seen_s = time.monotonic()
            self._act(member, transition)

    def publish_failed(self, member: Member, reason: str) -> None:
        """It failed a step or a check of the current publish; it may have been given up in it before."""
        transition = self._membership.publish_failed(member.entry, reason)
        if transition.before != "ready":
            logger.warning("%s does not get into service: %s", member.url, reason)
        self._act(member, transition)

    def request_failed(self, member: Member, sent_s: float, error: InstanceError) -> None:
        """Applies the consequences of a failed request: most faults are temporary and cause only a pause."""
        blame = blame_of(error)
        if isinstance(error, InstanceRestarted):
            self.note_process(member, error.boot_id)
        elif blame == "barred":
            self.note_failure(member, str(error))
        elif blame == "lost":
            self.note_lost(member, str(error))
        elif blame == "pause" and member.state in ("ready", "draining"):
            if member.circuit.is_closed:
                logger.warning("%s failed a request, and gets one to try it in a moment: %s", member.url, error)
            member.circuit.failed(time.monotonic(), sent_s, str(error))
            if isinstance(error, ConnectionLost):
                member.suspicion.set()

    async def get_to_know(self, member: Member, timeout_s: float) -> None:
        """Learns an instance's dialect before any other call: it joined later, or another server may have replaced it.

        Raises:
            InstanceError: it does not respond, or its model length is too small for this run.
        """
        await member.client.learn_dialect(timeout_s)
        max_model_len = await member.client.max_model_len(timeout_s)
        if max_model_len < self.min_model_len:
            reason = f"its model takes {max_model_len} tokens, this run needs {self.min_model_len}"
            self.note_useless(member, reason)
            raise InstanceError(f"instance {member.url}: {reason}")


def blame_of(error: InstanceError) -> Blame:
    """The consequence for the instance whose request ended with `error`."""
    if isinstance(error, InstanceTooSlow):
        return "none"
    if isinstance(error, InstanceStalled):
        return "lost"
    if isinstance(error, StaleWeights | BrokenAnswer):
        return "barred"
    # A refused token or a missing route is not temporary.
    is_lasting = isinstance(error, InstanceRefused) and error.status < 500 and error.status not in TRANSIENT
    return "barred" if is_lasting else "pause"
