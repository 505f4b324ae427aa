"""Sends a weight stream to many instances at once, through a weight group that is kept from publish to publish.

    form the weight group, unless the present one is still right -> all instances receive, the main thread broadcasts

An instance that breaks the group is named and left out; the caller then tries again with the rest, in a new group.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from urllib.parse import urlsplit

from async_rl.config.pool_section import PublishSection
from async_rl.errors import InstanceError, InstanceUnreachable, PublishError, WeightGroupBroken
from async_rl.event_loop import EventLoopThread
from async_rl.net.local_address import address_towards
from async_rl.pool.member import Member
from async_rl.protocol.inference import UpdateInfo
from async_rl.publish.instance_calls import InstanceCalls
from async_rl.publish.instance_update import ANSWER_MARGIN_S, receive
from async_rl.publish.rendezvous import FormedGroup, Rendezvous, sender_address
from async_rl.weights.nccl_version import HOPELESS, MATCHING, UNKNOWN, nccl_version, number_of
from async_rl.weights.stream import MakeStream

Drop = Callable[[Mapping[Member, InstanceError]], None]
"""Takes instances out of the publish, each with its error."""

POLL_S = 0.002
EARLY = 0.8
"""A rendezvous that fails within this part of the timeout does not fail for want of those who are not there yet."""


class Broadcast:
    """The sending side; one call at a time, from the main thread."""

    def __init__(self, loop: EventLoopThread, config: PublishSection, backend: str, drop: Drop) -> None:
        self._loop = loop
        self._config = config
        self._backend = backend
        self._drop = drop
        self._formed: FormedGroup | None = None

    def move(self, members: Sequence[Member], info: UpdateInfo, make_stream: MakeStream) -> str | None:
        """One attempt to send the stream to all of `members`; returns its fingerprint, or None if the group broke.

        Drops the instances that prevented it, at least one, and those that failed without affecting the others.

        Raises:
            PublishError: the group broke, though no instance failed.
        """
        if not self._is_of(members) and not self._join(members):
            return None
        assert self._formed is not None
        self._formed.group.next_update()
        timeout_s = self._config.timeout_s
        calls = InstanceCalls(self._loop, members, lambda member: receive(member.client, info, timeout_s))
        try:
            if not self._all_accept(calls):
                return None
            fingerprint, problem = self._send(make_stream)
            if problem is None:
                self._drop(calls.settle(timeout_s + ANSWER_MARGIN_S))
            else:
                failures = self._break_off(calls)
                # The first failure breaks the connections of the other instances, which are not to blame.
                self._drop_guilty(failures, list(failures)[:1], problem)
            return fingerprint
        finally:
            if calls.cancel():
                # The stream itself failed or the user interrupted it, with receivers waiting for the rest.
                self.close()

    def close(self) -> None:
        """Leaves the weight group; the instances notice with their next update."""
        if self._formed is not None:
            self._formed.close()
            self._formed = None

    def _is_of(self, members: Sequence[Member]) -> bool:
        """Whether the group has exactly these instances, and none of them may have been restarted since."""
        is_same = self._formed is not None and self._formed.members == set(members)
        return is_same and all(member.state == "ready" for member in members)

    def _join(self, members: Sequence[Member]) -> bool:
        """Forms a weight group with all of `members`; False after dropping those that prevented it."""
        self.close()
        timeout_s = self._config.timeout_s
        questions = InstanceCalls(self._loop, members, lambda member: member.client.world_size(timeout_s))
        self._drop(questions.settle(timeout_s=None))
        sizes = questions.results()
        if len(sizes) < len(members):
            return False
        if self._backend == "nccl" and not self._have_our_nccl(members):
            return False
        routes = self._routes(members)
        if len(routes) < len(members):
            return False
        address = sender_address(self._config.master_address, list(routes.values()))
        rendezvous = Rendezvous(sizes, address, self._config, self._backend)
        calls = InstanceCalls(
            self._loop,
            members,
            lambda member: member.client.init_weight_transfer(
                rendezvous.invitation(member), timeout_s + ANSWER_MARGIN_S
            ),
        )
        deadline = time.monotonic() + EARLY * timeout_s
        try:
            while not rendezvous.wait(POLL_S) and not calls.failures():
                pass
            refused, absent, is_late = calls.failures(), rendezvous.absent(), time.monotonic() > deadline
            if refused or rendezvous.has_failed:
                rendezvous.call_off(absent if is_late else refused)
            failures = calls.settle(timeout_s + ANSWER_MARGIN_S)
        finally:
            calls.cancel()
        self._formed = rendezvous.formed()
        if self._formed is not None and not failures:
            return True
        if any(text in rendezvous.problem for text in HOPELESS):
            reason = (
                f"NCCL refuses the weight group: {rendezvous.problem}; trainer and instances need one NCCL: {MATCHING}"
            )
            self._drop({member: InstanceError(f"instance {member.url}: {reason}") for member in members})
            return False
        failures = failures or {m: WeightGroupBroken(f"instance {m.url}: {rendezvous.problem}") for m in members}
        if own := {} if is_late else {member: error for member, error in refused.items() if member in absent}:
            self._drop(own)
        else:
            # Those who came failed because of others: of those who did not, once these had had the time.
            late = [member for member in failures if member in absent] if is_late else []
            self._drop_guilty(failures, late or refused or failures, rendezvous.problem)
        return False

    def _have_our_nccl(self, members: Sequence[Member]) -> bool:
        """Whether each instance has this process's NCCL; drops those with another. One that reports none passes."""
        ours = nccl_version()
        if number_of(ours) == UNKNOWN:
            return True
        timeout_s = self._config.timeout_s
        calls = InstanceCalls(self._loop, members, lambda member: member.client.nccl_versions(timeout_s))
        failures = calls.settle(timeout_s=None)
        for member, versions in calls.results().items():
            others = sorted({version for version in versions if number_of(version) != number_of(ours)})
            if others:
                failures[member] = InstanceError(
                    f"instance {member.url} has NCCL {', '.join(others)} and the trainer {ours}: NCCL connects equal "
                    f"versions only; install a matching pair, such as {MATCHING}, or set publish.transport = 'snapshot'"
                )
        self._drop(failures)
        return not failures

    def _routes(self, members: Sequence[Member]) -> dict[Member, str]:
        """The source address of this host's route to each instance; drops those without a route."""
        routes, failures = {}, {}
        for member in members:
            try:
                routes[member] = address_towards(urlsplit(member.url).hostname or "")
            except OSError as error:
                failures[member] = InstanceUnreachable(f"instance {member.url}: no route leads to it: {error}")
        self._drop(failures)
        return routes

    def _all_accept(self, calls: InstanceCalls[None]) -> bool:
        """Waits until every worker is ready to receive; otherwise ends the group and drops instances that refuse."""
        assert self._formed is not None
        deadline = time.monotonic() + self._config.timeout_s
        while missing := self._formed.missing():
            if refused := calls.failures():
                self._break_off(calls)
                self._drop(refused)
                return False
            if time.monotonic() > deadline:
                calls.cancel(missing)
                self._break_off(calls)
                timeout_s = self._config.timeout_s
                reason = f"it did not accept the list of tensors within {timeout_s:g} s (publish.timeout_s)"
                self._drop({member: InstanceUnreachable(f"instance {member.url}: {reason}") for member in missing})
                return False
            time.sleep(POLL_S)
        return True

    def _break_off(self, calls: InstanceCalls[None]) -> dict[Member, InstanceError]:
        """Ends an update for all instances and returns their errors. Live ones notice the closed group at once."""
        self.close()
        return calls.settle(ANSWER_MARGIN_S)

    def _send(self, make_stream: MakeStream) -> tuple[str, None] | tuple[None, str]:
        """Broadcasts the stream; returns its fingerprint, or the error that broke the group.

        The error is returned as text, because its traceback would keep the broken group's connections open.
        """
        assert self._formed is not None
        try:
            return self._formed.group.send(make_stream(), self._config.bucket_bytes), None
        except PublishError as error:
            return None, str(error)

    def _drop_guilty(self, failures: Mapping[Member, InstanceError], suspects: Iterable[Member], problem: str) -> None:
        """Drops the instances that broke a group: those that are unreachable, else the suspects."""
        if not failures:
            raise PublishError(f"the weight group broke, though no instance failed: {problem}")
        unreachable = {m: error for m, error in failures.items() if isinstance(error, InstanceUnreachable)}
        self._drop(unreachable or {member: WeightGroupBroken(str(failures[member])) for member in suspects})
