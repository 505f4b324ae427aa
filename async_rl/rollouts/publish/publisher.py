"""Puts one version of the weights on every instance of the pool, once per period.

One thread calls it and the sender of the weights; the HTTP calls run on the event loop, to all instances concurrently:

    end admissions -> leave out instances that do not respond -> where adapters are published alone, send the base to
    those that hold another one -> canary, where it is due (`canary.py`)
    -> send the stream, by broadcast or snapshot -> compare fingerprints
    -> finish with the version -> resume -> read the version back -> compare log-probs -> in service

An instance that fails a step is out of service, with the reason, until the next publish; no instance serves with an
incomplete stream.
"""

import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar

from async_rl.config.pool_section import PublishSection
from async_rl.errors import (
    InstanceError,
    InstanceRefused,
    InstanceUnreachable,
    PublishError,
    WeightGroupBroken,
    WeightsRefused,
)
from async_rl.method.types import Publication, WeightVersion
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.pool.member import Member
from async_rl.rollouts.pool.membership import BootId
from async_rl.rollouts.publish.admission import Admission, Offer
from async_rl.rollouts.publish.broadcast import Broadcast
from async_rl.rollouts.publish.canary import Canary
from async_rl.rollouts.publish.instance_calls import InstanceCalls
from async_rl.rollouts.publish.instance_update import announcement, base_digest, put_in_service, receive
from async_rl.rollouts.publish.probe import Probe
from async_rl.rollouts.publish.trial_request import Samples
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.protocol.sender import Content, Sender

logger = logging.getLogger(__name__)

T = TypeVar("T")

HEALTH_TIMEOUT_S = 3.0
"""The time that an instance which stopped or was cut off a moment ago costs a publish."""

DEAD_TIMEOUT_S = 0.5
"""The time that one which counts as dead costs each further publish: it may respond again."""

RETRY_S = 0.5
LOG_INTERVAL_S = 10.0


class Publisher:
    """Publishes to the instances of `pool`; one call at a time, from one thread."""

    def __init__(
        self,
        pool: InferencePool,
        loop: EventLoopThread,
        config: PublishSection,
        sender: Sender,
        *,
        wait_s: float,
        admission: Admission | None = None,
        probe: Probe | None = None,
        canary: Canary | None = None,
        takes_turns: bool = False,
    ) -> None:
        """Parts that are None are skipped.

        Args:
            sender: the trainer's main rank; its owner closes it.
            wait_s: how long a publish waits for an instance if none responds, or all were lost during it; or if all
                that came refuse, and others may come (`InferencePool.is_open`).
            admission: gets every snapshot.
            probe: compares the engines that may hold something else than they received.
            canary: checks each kind of engine with changed weights before the true ones.
            takes_turns: whether instances have the trainer's own devices: they sleep while it computes there, as it
                does to judge a canary.
        """
        self._takes_turns = takes_turns
        self._pool = pool
        self._loop = loop
        self._config = config
        self._sender = sender
        self._wait_s = wait_s
        self._admission = admission
        self._probe = probe
        self._canary = canary
        self._broadcast = Broadcast(loop, config, sender, self._drop)
        self._worker_counts = WorkerCounts(loop)
        self._dropped: dict[Member, InstanceError] = {}
        self._refusing: set[tuple[Member, BootId]] = set()
        """Processes that failed the publish under way for good."""
        self._tried_again: set[tuple[Member, BootId]] = set()
        """Processes that have served before, and refused a step of the publish under way once."""

    def publish(self, version: WeightVersion) -> Publication:
        """Puts `version` on every reachable instance, and exactly those in service.

        Raises:
            PublishError: no instance received the weights; lists each one's reason.
            RunStopped, LeaderFailed: the run has to end while the publish waits for an instance.
            ConfigError: the snapshot could not be written.
        """
        started = time.monotonic()
        deadline = started + self._wait_s
        pause_s, canary_s = RETRY_S, 0.0
        if self._admission is not None:
            self._admission.offer = None
        self._refusing, self._tried_again = set(), set()
        while True:
            members = self._with_base(self._asleep(self._reachable(deadline)), version)
            if self._canary is not None:
                asked_s = time.monotonic()
                members = self._let_canary_pass(self._canary, members, version)
                canary_s += time.monotonic() - asked_s
            offer, members = self._move(members, version)
            if offer is not None:
                reached = self._put_in_service(members, offer)
                members = self._end(version, reached, offer)
            else:
                reached = {}
            if members or not self._is_worth_another_try(deadline, has_lost=bool(reached)):
                break
            logger.warning("the publish lost every instance on its way, and tries again:%s", self._reasons())
            self._sender.watch()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LOG_INTERVAL_S)
        if offer is None or not members:
            self._loop.run(self._pool.end_publish(version, ()))
            would_recur = bool(self._dropped) and not any(map(_may_pass, self._dropped.values()))
            kind = WeightsRefused if would_recur else PublishError
            raise kind(f"weight version {version!r} reached no instance:{self._reasons()}")
        facts = self._sender.facts()
        whole_bytes = facts.num_bytes if facts.adapter is None else facts.adapter.num_bytes
        num_bytes = whole_bytes if offer.num_bytes is None else offer.num_bytes
        num_workers = self._worker_counts.total(members)
        urls = tuple(member.url for member in members)
        return Publication(
            version, offer.fingerprint, urls, num_bytes, time.monotonic() - started, num_workers, canary_s
        )

    def _end(self, version: WeightVersion, members: Mapping[Member, BootId], offer: Offer) -> list[Member]:
        """Ends the publish with `members`; returns those that are in service: others may have been removed or drained
        meanwhile, or started anew.

        Args:
            members: each with the process that has just said that it holds the version, if it is known.
        """
        if not members:
            return []
        if self._admission is not None and offer.info.snapshot is not None:
            self._admission.offer = offer
        urls = {member.url: boot_id for member, boot_id in members.items()}
        self._loop.run(self._pool.end_publish(version, urls, urls))
        # One that was removed may have been added again meanwhile: it is the same process with the same weights.
        return [member for member in self._pool.members if member.url in urls and member.state == "ready"]

    def _is_worth_another_try(self, deadline: float, *, has_lost: bool) -> bool:
        """Whether instances were lost, which others may replace, or broke a group that may hold the next time; what
        each of them refuses would recur, but others may come. One that has served refuses a step perhaps only because
        another program has changed its state meanwhile.

        Args:
            has_lost: whether instances held the weights, and are not in service nevertheless.
        """
        passing = {m for m, e in self._dropped.items() if isinstance(e, InstanceUnreachable | WeightGroupBroken)}
        refusing = {(member, member.entry.boot_id) for member in self._dropped.keys() - passing}
        again = {key for key in refusing - self._tried_again if key[0].version is not None}
        self._tried_again |= again
        self._refusing |= refusing - again
        passing |= {member for member, _ in again}
        return (bool(passing) or has_lost or self._pool.is_open) and time.monotonic() < deadline

    def _reachable(self, deadline: float) -> list[Member]:
        """The instances that respond, of those that may receive weights; waits for one if there is none."""
        next_log = 0.0
        while True:
            self._dropped = {}
            members = self._loop.run(self._pool.begin_publish())
            members = [member for member in members if (member, member.entry.boot_id) not in self._refusing]
            silent = self._silent(members)
            self._dropped |= silent
            reachable = self._remaining(members)
            if reachable or time.monotonic() > deadline:
                ready = {member: error for member, error in silent.items() if member.state == "ready"}
                self._note(self._pool.note_lost, ready)
                return reachable
            if time.monotonic() >= next_log:
                next_log = time.monotonic() + LOG_INTERVAL_S
                logger.warning("no instance answers; the publish waits for one:%s", self._reasons())
            self._sender.watch()
            time.sleep(RETRY_S)

    def _silent(self, members: Sequence[Member]) -> dict[Member, InstanceError]:
        """Those that do not respond; if any other does, the dead ones are given little time."""
        calls = InstanceCalls(self._loop, members, self._require_answer)
        calls.wait([member for member in members if member.state != "dead"])
        return calls.settle(DEAD_TIMEOUT_S if calls.results() else None)

    async def _require_answer(self, member: Member) -> None:
        client = member.client
        try:
            self._pool.note_process(member, await client.health(HEALTH_TIMEOUT_S))
        except InstanceRefused as error:
            # 503: it runs, and may be unable to serve because of an incomplete update; a complete one repairs that.
            if error.status != 503:
                raise
        if member.state != "ready":
            await self._pool.get_to_know(member, HEALTH_TIMEOUT_S)

    def _let_canary_pass(self, canary: Canary, members: Sequence[Member], version: WeightVersion) -> list[Member]:
        """Those of `members` that may serve; the others did not compute with the changed weights."""
        due = [member for member, is_due in self._ask(members, canary.due).items() if is_due]
        numbers = count(1)

        def sample(among: Sequence[Member]) -> dict[Member, Samples]:
            """What they sample from the trainer's weights as these are now."""
            trial = f"{version}-canary-{next(numbers)}"
            offer, among = self._move(among, trial)
            if offer is None:
                return {}
            self._finish(among, offer)
            samples = self._ask(self._remaining(among), lambda member: canary.ask(member.client, trial))
            self._asleep(list(samples))
            return samples

        if due:
            with canary.changed(self._sender):
                self._drop(canary.judge(sample(due), self._sender, sample))
        return self._remaining(members)

    def _with_base(self, members: Sequence[Member], version: WeightVersion) -> list[Member]:
        """Those of `members` that hold the weights below adapters which are published alone; others get these first."""
        adapter = self._sender.facts().adapter
        if adapter is None:
            return list(members)
        timeout_s, names = self._config.timeout_s, self._sender.facts().names
        held = self._ask(members, lambda member: base_digest(member.client, names, timeout_s))
        lacking = [member for member, digest in held.items() if digest != adapter.base]
        self._drop(
            {
                member: InstanceError(
                    f"instance {member.url} has other weights (digest {held[member]}) than those below the trainer's "
                    f"adapters ({adapter.base}), and {member.client.dialect.name} takes no others beside adapters: "
                    "start it with the trainer's model and dtype, or set adapter.publish to 'merged'"
                )
                for member in lacking
                if not member.client.dialect.holds_what_it_received
            }
        )
        lacking = [member for member in lacking if member not in self._dropped]
        offer, lacking = self._move(lacking, f"{version}-base", "whole")
        if offer is not None:
            # An update that is still open ends where another weight group is formed, for more instances or fewer.
            self._finish(lacking, offer)
        return self._remaining(members)

    def _move(
        self, members: Sequence[Member], version: WeightVersion, content: Content | None = None
    ) -> tuple[Offer | None, list[Member]]:
        """Sends a stream to `members`; returns its offer, or None if no instance received it, and the receivers.

        Args:
            content: by default what a version is: adapters, where they are published alone.
        """
        if not members:
            return None, []
        facts = self._sender.facts()
        content = content or ("whole" if facts.adapter is None else "adapters")
        info = announcement(facts, content)
        if self._config.transport == "snapshot":
            sent = self._sender.write_snapshot(version, content)
            read = info.model_copy(update={"snapshot": sent.snapshot})
            timeout_s, wakes = self._config.timeout_s, self._takes_turns
            self._ask(members, lambda member: receive(member.client, read, timeout_s, wakes=wakes))
            offer = Offer(version, read, sent.fingerprint, sent.snapshot_fingerprint, facts.names)
            return offer, self._remaining(members)
        left, received = list(members), None
        while left and received is None:
            received = self._broadcast.move(left, info, version)
            left = self._remaining(left)
        if received is None:
            return None, []
        read = info.model_copy(update={"snapshot": received.snapshot})
        fingerprints = received.fingerprint, received.snapshot_fingerprint
        return Offer(version, read, *fingerprints, facts.names, received.num_bytes), left

    def _put_in_service(self, members: Sequence[Member], offer: Offer) -> dict[Member, BootId]:
        """Those of `members` that hold the sent weights and, as far as they are probed, compute with them; as `_end`
        takes them."""
        holders = self._finish(members, offer)
        left = self._remaining(members)
        if self._probe is not None:
            probe = self._probe
            probed = [member for member in left if not member.client.dialect.holds_what_it_received]
            answers = self._ask(probed, lambda member: probe.ask(member.client, offer.version))
            self._drop(probe.judge(answers, self._sender.score))
            if probed:
                # That takes a while, in which any may have been started anew.
                holders |= dict.fromkeys(left)
        return {member: holders[member] for member in self._remaining(left)}

    def _finish(self, members: Sequence[Member], offer: Offer) -> dict[Member, BootId]:
        timeout_s, wakes, has_adapters = self._config.timeout_s, self._takes_turns, offer.info.adapter is not None

        async def finish(member: Member) -> BootId:
            of_offer = (member.client, offer.fingerprint, offer.version)
            return await put_in_service(*of_offer, timeout_s, wakes=wakes, has_adapters=has_adapters)

        return self._ask(members, finish)

    def _asleep(self, members: Sequence[Member]) -> list[Member]:
        """Those of `members` that have left the devices to the trainer, where they have the same ones."""
        if self._takes_turns:
            self._ask(members, lambda member: member.client.sleep(self._config.timeout_s))
        return self._remaining(members)

    def _ask(self, members: Sequence[Member], call: Callable[[Member], Coroutine[Any, Any, T]]) -> dict[Member, T]:
        """Results of the successful calls; the other instances are dropped. The calls have their own timeouts."""
        calls = InstanceCalls(self._loop, members, call)
        self._drop(calls.settle(timeout_s=None))
        return calls.results()

    def _drop(self, failures: Mapping[Member, InstanceError]) -> None:
        """Takes instances out of this publish, and out of service."""
        self._dropped |= failures
        # Not `note_lost`, which allows a return: it may hold the version, but failed to prove it.
        self._note(self._pool.publish_failed, failures)

    def _note(self, note: Callable[[Member, str], None], failures: Mapping[Member, InstanceError]) -> None:
        """Reports each failure to the pool, on its loop."""

        async def tell() -> None:
            for member, error in failures.items():
                note(member, str(error))

        if failures:
            self._loop.run(tell())

    def _remaining(self, members: Iterable[Member]) -> list[Member]:
        return [member for member in members if member not in self._dropped]

    def _reasons(self) -> str:
        """A line for each instance of the pool that does not take part in this publish."""
        reasons = {member: self._dropped.get(member) or member.reason for member in self._pool.members}
        return "".join(f"\n  {member.url}: {why}" for member, why in reasons.items()) or " the pool has no instance"


def _may_pass(error: InstanceError) -> bool:
    """Whether the same instance, started again with the trainer, may do without the error."""
    if isinstance(error, InstanceRefused):
        return error.status >= 500
    return isinstance(error, InstanceUnreachable | WeightGroupBroken)


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
