"""Which instances are in service, and why: the one state machine of the pool. Pure: facts in, transitions out.

An instance is ready on evidence only: it passed the publish of the version in training with all its checks, or was
admitted with that version, or returned as the same process that did so. The evidence is kept by (URL, boot id) for one
version, separate from the instance's own entry: removing an instance and adding it again neither proves nor clears
anything.

`roster.py` reports the facts and acts on the transitions (cancels requests, wakes the router, logs); no other code
changes an entry.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from async_rl.method.types import WeightVersion
from async_rl.shared.protocol.fleet import InstanceState

State = InstanceState | Literal["gone"]
"""The states of the protocol, and `gone` for an instance that was removed."""

BootId = str | None
"""Names the process behind a URL, new with each start; None if the server does not report one."""

MAX_RETURNS = 3
"""Returns of one process after faults, between two publishes: one that hangs repeatedly while its health is good
costs `pool.request_timeout_s` each time."""

MAX_FAILED_PUBLISHES = 3
"""An instance that failed this many publishes in a row is left out: it would slow down every further one."""


class Event(StrEnum):
    """The events of an instance.

    RECEIVED: it passed all checks of the publish of the version in training, or of an admission with it.
    MISSED: a publish ended without it.
    RETURNED: it responds as the process that received the version in training, still holds it, and is not barred.
    ANSWERED: it responds, and the condition of RETURNED does not hold.
    RESTARTED: another process responds under its address.
    FAILED: it responded with other weights or other content than requested, failed a step of a publish or an
        admission, or refuses the token: barred.
    UNWELL: its health check returns a server error for `pool.heartbeat_timeout_s`.
    LOST: no connection, or no response for `pool.heartbeat_timeout_s`, or no token for `pool.request_timeout_s`.
    DRAINED: `drain`, or its address is no longer in the name service.
    REMOVED: `remove`, or it drained and has no requests in flight.
    """

    RECEIVED = "received"
    MISSED = "missed"
    RETURNED = "returned"
    ANSWERED = "answered"
    RESTARTED = "restarted"
    FAILED = "failed"
    UNWELL = "unwell"
    LOST = "lost"
    DRAINED = "drained"
    REMOVED = "removed"


STATES: tuple[InstanceState, ...] = ("joining", "ready", "draining", "stale", "dead")

_ROWS: Mapping[Event, tuple[State, State, State, State, State]] = {
    Event.RECEIVED: ("ready", "ready", "draining", "ready", "ready"),
    Event.MISSED: ("joining", "stale", "draining", "stale", "dead"),
    Event.RETURNED: ("ready", "ready", "draining", "ready", "ready"),
    Event.ANSWERED: ("joining", "ready", "draining", "stale", "stale"),
    Event.RESTARTED: ("joining", "joining", "draining", "joining", "joining"),
    Event.FAILED: ("stale", "stale", "draining", "stale", "stale"),
    Event.UNWELL: ("joining", "stale", "draining", "stale", "stale"),
    Event.LOST: ("dead", "dead", "draining", "dead", "dead"),
    Event.DRAINED: ("draining", "draining", "draining", "draining", "draining"),
    Event.REMOVED: ("gone", "gone", "gone", "gone", "gone"),
}

TRANSITIONS: Mapping[tuple[State, Event], State] = {
    (state, event): target for event, row in _ROWS.items() for state, target in zip(STATES, row, strict=True)
} | {("gone", event): "gone" for event in Event}


@dataclass(frozen=True, slots=True)
class Transition:
    """The result of a fact; `before` and `after` may be equal."""

    event: Event
    before: State
    after: State

    @property
    def ends_requests(self) -> bool:
        """Whether its running requests are given up, to be continued by other instances."""
        return self.event in (Event.LOST, Event.RESTARTED, Event.REMOVED)


class InstanceEntry:
    """One instance's entry. All may read it; only `Membership` changes it.

    `version` is the one it was last put in service with, `boot_id` the process that last responded, `reason` why it is
    not ready. `registered_as` is the boot id of its heartbeats.
    """

    __slots__ = ("_boot_id", "_failed_publishes", "_reason", "_registered_as", "_state", "_version", "url")

    def __init__(self, url: str, registered_as: BootId = None) -> None:
        self.url = url
        self._state: State = "joining"
        self._reason: str | None = "it has not received any weights of this run yet"
        self._version: WeightVersion | None = None
        self._boot_id: BootId = None
        self._registered_as = registered_as
        self._failed_publishes = 0

    @property
    def state(self) -> State:
        return self._state

    @property
    def reason(self) -> str | None:
        return self._reason

    @property
    def version(self) -> WeightVersion | None:
        return self._version

    @property
    def boot_id(self) -> BootId:
        return self._boot_id

    @property
    def registered_as(self) -> BootId:
        return self._registered_as

    @property
    def failed_publishes(self) -> int:
        """Publishes in a row that it failed."""
        return self._failed_publishes

    @property
    def is_in_service(self) -> bool:
        """Whether it serves, drains or was removed, so that it need not be returned to service."""
        return self._state in ("ready", "draining", "gone")


class Membership:
    """The version in training, the evidence for it, and the consequences of each fact for an entry."""

    def __init__(self) -> None:
        self.version: WeightVersion | None = None
        """The version in training; None before the first publish and during one."""
        self._proofs: set[tuple[str, str]] = set()
        self._bars: set[tuple[str, BootId]] = set()
        self._num_returns: Counter[tuple[str, BootId]] = Counter()
        self._failed_now: set[InstanceEntry] = set()
        """Instances that failed the current publish, in any of its attempts."""

    # A publish

    def begin_publish(self) -> None:
        """Ends the service of the present version: its evidence and bars are cleared."""
        self.version = None
        self._proofs.clear()
        self._bars.clear()
        self._num_returns.clear()

    def may_receive(self, entry: InstanceEntry) -> bool:
        """Whether a publish includes it at all."""
        return entry.state not in ("draining", "gone") and entry.failed_publishes < MAX_FAILED_PUBLISHES

    def publish_failed(self, entry: InstanceEntry, reason: str) -> Transition:
        """It failed a step or a check of the current publish, which may attempt it again."""
        self._failed_now.add(entry)
        return self.failed(entry, reason)

    def end_publish(
        self, version: WeightVersion, entries: Iterable[InstanceEntry], holders: Mapping[str, BootId]
    ) -> list[Transition]:
        """Puts exactly `holders`, boot ids by URL, in service with `version`; one transition for each entry."""
        self.version = version
        transitions = []
        failed, self._failed_now = self._failed_now, set()
        for entry in entries:
            entry._failed_publishes += entry in failed
            if entry.url in holders:
                transitions.append(self._receive(entry, version, holders[entry.url]))
            else:
                was_ready = entry.state == "ready"
                reason = f"it did not receive weight version {version!r}" if was_ready else entry.reason
                transitions.append(_apply(entry, Event.MISSED, reason))
        return transitions

    # Between two publishes

    def answered(self, entry: InstanceEntry, version: WeightVersion, boot_id: BootId) -> Transition:
        """It reports the weights it holds and its process."""
        if (restart := self.seen(entry, boot_id)) is not None:
            return restart
        if version == self.version and self._may_return(entry.url, boot_id):
            if entry.state in ("stale", "dead"):
                self._num_returns[entry.url, boot_id] += 1
            return self._serve(entry, Event.RETURNED, version)
        return _apply(entry, Event.ANSWERED, self._why_not(entry, version, boot_id))

    def seen(self, entry: InstanceEntry, boot_id: BootId) -> Transition | None:
        """It responded as this process; returns a transition if it is another one than before: its weights and running
        requests are lost."""
        if boot_id is None or boot_id == entry.boot_id:
            return None
        is_new = entry.boot_id is None and entry.version is None
        entry._boot_id = boot_id
        if is_new:
            return None
        entry._version, entry._failed_publishes = None, 0
        self._failed_now.discard(entry)
        return _apply(entry, Event.RESTARTED, "it was started anew, without weights of this run")

    def registered(self, entry: InstanceEntry, boot_id: str) -> None:
        """It sent a heartbeat; it may have been known by its address only."""
        entry._registered_as = boot_id

    def may_be_admitted(self, entry: InstanceEntry) -> bool:
        """Whether it may receive the version in training between two publishes."""
        return self.version is not None and not entry.is_in_service and not self.is_barred(entry)

    def admitted(self, entry: InstanceEntry, version: WeightVersion, boot_id: BootId) -> Transition | None:
        """It received `version`, with the checks of a publish; None if that version is not in training any more."""
        if version != self.version or entry.is_in_service:
            return None
        return self._receive(entry, version, boot_id)

    def useless(self, entry: InstanceEntry, reason: str) -> Transition:
        """It responds, but cannot serve this run."""
        return _apply(entry, Event.ANSWERED, entry.reason if entry.is_in_service else reason)

    def is_barred(self, entry: InstanceEntry) -> bool:
        """Whether it is out until the next publish whatever it reports; if its boot id is unknown, with any boot id."""
        return bool({(entry.url, entry.boot_id), (entry.url, None)} & self._bars)

    # Faults and commands

    def failed(self, entry: InstanceEntry, reason: str) -> Transition:
        """Its response shows that it must not serve this version: it is barred until the next publish."""
        self._bars.add((entry.url, entry.boot_id))
        if entry.boot_id is not None:
            self._proofs.discard((entry.url, entry.boot_id))
        return _apply(entry, Event.FAILED, reason)

    def unwell(self, entry: InstanceEntry, reason: str) -> Transition:
        """Its health check has failed for too long."""
        return _apply(entry, Event.UNWELL, reason)

    def lost(self, entry: InstanceEntry, reason: str) -> Transition:
        """It does not respond, or generates no tokens."""
        return _apply(entry, Event.LOST, reason)

    def drained(self, entry: InstanceEntry) -> Transition:
        return _apply(entry, Event.DRAINED, "it finishes what it has")

    def removed(self, entry: InstanceEntry, reason: str) -> Transition:
        return _apply(entry, Event.REMOVED, reason)

    def can_return(self, entries: Iterable[InstanceEntry]) -> bool:
        """Whether any process may return before the next publish, as far as known without one: at one of these
        instances, or at one that was removed and may be added again."""
        present = {entry.url: entry for entry in entries}
        return any(
            self._may_return(url, boot_id) and (url not in present or _may_be(present[url], boot_id))
            for url, boot_id in self._proofs
        )

    def _may_return(self, url: str, boot_id: BootId) -> bool:
        """Whether this process may return, if it reports to hold the version in training."""
        if boot_id is None or (url, boot_id) not in self._proofs:
            return False
        return not {(url, boot_id), (url, None)} & self._bars and self._num_returns[url, boot_id] < MAX_RETURNS

    def _receive(self, entry: InstanceEntry, version: WeightVersion, boot_id: BootId) -> Transition:
        entry._boot_id, entry._failed_publishes = boot_id, 0
        self._bars -= {(entry.url, boot_id), (entry.url, None)}
        if boot_id is not None:
            self._proofs.add((entry.url, boot_id))
        return self._serve(entry, Event.RECEIVED, version)

    def _serve(self, entry: InstanceEntry, event: Event, version: WeightVersion) -> Transition:
        transition = _apply(entry, event, entry.reason)
        if transition.after == "ready":
            entry._reason, entry._version = None, version
        return transition

    def _why_not(self, entry: InstanceEntry, version: WeightVersion, boot_id: BootId) -> str | None:
        if entry.is_in_service or self.version is None or self.is_barred(entry):
            return entry.reason
        if version != self.version:
            return f"it holds weight version {version!r}: it needs the next publish"
        if boot_id is None:
            return "it does not tell which process it is, which may have been started anew: it needs the next publish"
        if (entry.url, boot_id) in self._proofs:
            return f"it came back {MAX_RETURNS} times already since the last publish: it needs the next one"
        return f"it says that it holds weight version {version!r}, which nobody checked: it needs the next publish"


def _may_be(entry: InstanceEntry, boot_id: BootId) -> bool:
    """Whether that process may be behind an instance that is out of service."""
    return not entry.is_in_service and entry.boot_id in (None, boot_id)


def _apply(entry: InstanceEntry, event: Event, reason: str | None) -> Transition:
    """Changes an entry's state; a draining one keeps its reason, a removed one keeps everything."""
    before = entry.state
    after = TRANSITIONS[before, event]
    entry._state = after
    if before not in ("draining", "gone") or event is Event.REMOVED:
        entry._reason = reason
    return Transition(event, before, after)
