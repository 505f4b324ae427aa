"""Has a weight stream sent to many instances at once, through a weight group that is kept from publish to publish.

    form the weight group, unless the present one is still right -> all instances receive, the sender broadcasts

An instance that breaks the group is named and left out; the caller then tries again with the rest, in a new group.
Where time ran out, it is the one that says it stood still: others wait for their neighbours, who wait for theirs. If
none does, as where a network was slow, nobody is left out the first time.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from urllib.parse import urlsplit

from async_rl.config.pool_section import PublishSection
from async_rl.errors import InstanceError, InstanceUnreachable, PublishError, WeightGroupBroken
from async_rl.rollouts.pool.member import Member
from async_rl.rollouts.publish.instance_calls import InstanceCalls
from async_rl.rollouts.publish.instance_update import ANSWER_MARGIN_S, receive
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.programs.nccl_package import MATCHING
from async_rl.shared.protocol.group_errors import BROKE, stood_still_s, unreached_rank
from async_rl.shared.protocol.inference import InitInfo, UpdateInfo
from async_rl.shared.protocol.sender import Sender, Sent

logger = logging.getLogger(__name__)

Drop = Callable[[Mapping[Member, InstanceError]], None]
"""Takes instances out of the publish, each with its error."""

WAIT_S = 0.02
"""How long the sender waits in one call, while instances may fail theirs."""

EARLY = 0.8
"""A rendezvous that fails within this part of the timeout does not fail for want of those who are not there yet."""

HOPELESS = ("ncclInvalidUsage", "Mismatched NCCL version")
"""In NCCL's errors: the same members would fail again."""


class Broadcast:
    """The control side; one call at a time, from the thread that calls the sender."""

    def __init__(self, loop: EventLoopThread, config: PublishSection, sender: Sender, drop: Drop) -> None:
        self._loop = loop
        self._config = config
        self._sender = sender
        self._drop = drop
        self._owners: dict[int, Member] = {}
        """Of the formed weight group: the instance that each rank from 1 on belongs to."""
        self._last: set[Member] = set()
        """Whom another one could not connect to: the last of a chain needs no connection from others."""
        self._unexplained: list[Member] = []
        """With whom the last group broke, if nobody was left out for it."""

    def move(self, members: Sequence[Member], info: UpdateInfo, version: str) -> Sent | None:
        """One attempt to send the stream to all of `members`; None if the group broke.

        Drops the instances that prevented it, and those that failed without affecting the others; at least one, unless
        the group was the first in a row that broke for no reason of any instance's own.

        Raises:
            PublishError: the group broke, though no instance failed; or twice because the sender stood still.
        """
        if not self._is_of(members) and not self._join(members):
            return None
        timeout_s = self._config.timeout_s
        calls = InstanceCalls(self._loop, members, lambda member: receive(member.client, info, timeout_s))
        try:
            if not self._all_accept(calls):
                return None
            sent = self._sender.send(version, "whole" if info.adapter is None else "adapters")
            failures = calls.settle(timeout_s + ANSWER_MARGIN_S) if sent.problem is None else {}
            if sent.problem is None and len(failures) < 2:
                self._drop(failures)
                self._unexplained = []
                return sent
            # Whoever fails amid a stream leaves, before those whose connections it breaks notice.
            lost = [self._owners[rank] for rank in self._sender.wait_formed(0.0).lost]
            if sent.problem is None and not set(lost) & set(failures):
                self._drop(failures)
                self._unexplained = []
                return sent
            known = None if sent.failed is None else self._owners[sent.failed]
            self._drop_breaker(members, self._break_off(calls), known, lost, sent.problem or "")
            return None
        finally:
            if calls.cancel():
                # The stream itself failed or the user interrupted it, with receivers waiting for the rest.
                self._leave()

    def _leave(self) -> None:
        """Leaves the weight group; the instances notice with their next update."""
        self._owners = {}
        self._sender.leave_group()

    def _is_of(self, members: Sequence[Member]) -> bool:
        """Whether the group has exactly these instances, and none of them may have been restarted since."""
        is_same = set(self._owners.values()) == set(members)
        return is_same and all(member.state == "ready" for member in members)

    def _join(self, members: Sequence[Member]) -> bool:
        """Forms a weight group with all of `members`; False after dropping those that prevented it."""
        self._leave()
        members = sorted(members, key=lambda member: member in self._last)
        timeout_s = self._config.timeout_s
        questions = InstanceCalls(self._loop, members, lambda member: member.client.world_size(timeout_s))
        self._drop(questions.settle(timeout_s=None))
        sizes = questions.results()
        if len(sizes) < len(members) or not self._have_its_nccl(members):
            return False
        infos = self._invitations(sizes)
        if infos is None:
            return False
        owners = {info.rank_offset + i: member for member, info in infos.items() for i in range(sizes[member])}
        # They join the group of one stage after the other.
        joining_s = max(1 + len(info.stage_ports) for info in infos.values()) * timeout_s + ANSWER_MARGIN_S
        calls = InstanceCalls(
            self._loop, members, lambda member: member.client.init_weight_transfer(infos[member], joining_s)
        )
        absent: set[Member] = set()
        late: set[Member] = set()
        lost: list[Member] = []
        problem = None
        deadline = time.monotonic() + EARLY * timeout_s
        try:
            while not (forming := self._sender.wait_formed(WAIT_S)).has_ended and not calls.failures():
                pass
            refused, is_late = calls.failures(), time.monotonic() > deadline
            if refused or forming.problem is not None:
                # Read after the failures: one that came before it failed is not absent.
                forming = self._sender.wait_formed(0.0)
                absent = {owners[rank] for rank in forming.absent}
                late = {owners[rank] for rank in (*forming.absent, *forming.late)}
                lost = [owners[rank] for rank in forming.lost]
                without = absent if is_late else refused
                problem = self._sender.call_off([rank for rank, member in owners.items() if member in without])
            failures = calls.settle(timeout_s + ANSWER_MARGIN_S)
        finally:
            calls.cancel()
        if problem is None and not failures:
            self._owners = owners
            return True
        named = {owners[rank] for error in failures.values() if (rank := unreached_rank(error)) in owners}
        if not named <= self._last:
            self._last |= named
            urls = ", ".join(sorted(member.url for member in self._last))
            logger.warning("not all instances reach %s: from now on these are last in the chain of weights", urls)
            return False
        self._drop_preventers(members, failures, refused, absent, late, lost, problem or "", is_late=is_late)
        return False

    def _drop_preventers(
        self,
        members: Sequence[Member],
        failures: Mapping[Member, InstanceError],
        refused: Mapping[Member, InstanceError],
        absent: set[Member],
        late: set[Member],
        lost: Sequence[Member],
        problem: str,
        *,
        is_late: bool,
    ) -> None:
        """Drops those that prevented a weight group.

        Args:
            failures: of all invitations, the earliest first; `refused`: of those that came before the rest was ended.
            absent: instances with a worker that had not come by then; `late`: these, and those of which one came when
                another member had given up.
            lost: instances with a worker that had come and gone by then, the first one first, which the others' ends
                may follow from: the sender may notice it before its call fails.
            problem: why the sender formed no group.
            is_late: whether those had had the time to come.
        """
        if any(text in problem for text in HOPELESS):
            reason = f"NCCL refuses the weight group: {problem}; trainer and instances need one NCCL: {MATCHING}"
            self._drop({member: InstanceError(f"instance {member.url}: {reason}") for member in members})
            return
        silent = lost or ([] if failures else members)
        failures = {m: WeightGroupBroken(f"instance {m.url}: {problem}") for m in silent} | dict(failures)
        if own := {} if is_late else {member: error for member, error in refused.items() if member in absent}:
            self._drop(own)
            return
        guilty = []
        if is_late and not any(isinstance(error, InstanceUnreachable) for error in failures.values()):
            # Those who came in time failed because of others.
            guilty = [member for member in failures if member in late and not stood_still_s(problem)]
            guilty = guilty or _who_stood_still(failures, problem)
            if not guilty and self._tries_again(members, problem):
                return
        self._drop_guilty(failures, guilty or lost[:1] or refused or failures, problem)

    def _have_its_nccl(self, members: Sequence[Member]) -> bool:
        """Whether each instance has the sender's NCCL; drops those with another. One that reports none passes."""
        of_sender = self._sender.facts().nccl_version
        if of_sender is None:
            return True
        timeout_s = self._config.timeout_s
        calls = InstanceCalls(self._loop, members, lambda member: member.client.nccl_versions(timeout_s))
        failures = calls.settle(timeout_s=None)
        for member, versions in calls.results().items():
            others = sorted({version for version in versions if _number_of(version) != _number_of(of_sender)})
            if others:
                failures[member] = InstanceError(
                    f"instance {member.url} has NCCL {', '.join(others)} and the trainer {of_sender}: NCCL connects "
                    f"equal versions only; install a matching pair, such as {MATCHING}, or set publish.transport = "
                    "'snapshot'"
                )
        self._drop(failures)
        return not failures

    def _invitations(self, sizes: Mapping[Member, int]) -> dict[Member, InitInfo] | None:
        """Lets the sender begin a weight group with instances of these numbers of workers; None after dropping those
        without a route."""
        hosts = {member: urlsplit(member.url).hostname or "" for member in sizes}
        answer = self._sender.form(list(hosts.values()), list(sizes.values()))
        if answer.without_route:
            self._drop(
                {
                    member: InstanceUnreachable(
                        f"instance {member.url}: no route leads to it: {answer.without_route[host]}"
                    )
                    for member, host in hosts.items()
                    if host in answer.without_route
                }
            )
            return None
        return {member: InitInfo.model_validate(info) for member, info in zip(sizes, answer.infos, strict=True)}

    def _all_accept(self, calls: InstanceCalls[None]) -> bool:
        """Waits until every worker is ready to receive; otherwise ends the group and drops instances that refuse."""
        deadline = time.monotonic() + self._config.timeout_s
        while ranks := self._sender.wait_accepted(WAIT_S):
            if refused := calls.failures():
                self._break_off(calls)
                self._drop(refused)
                return False
            if time.monotonic() > deadline:
                missing = {self._owners[rank] for rank in ranks}
                calls.cancel(missing)
                self._break_off(calls)
                timeout_s = self._config.timeout_s
                reason = f"it did not accept the list of tensors within {timeout_s:g} s (publish.timeout_s)"
                self._drop({member: InstanceUnreachable(f"instance {member.url}: {reason}") for member in missing})
                return False
        return True

    def _break_off(self, calls: InstanceCalls[None]) -> dict[Member, InstanceError]:
        """Ends an update for all instances and returns their errors. Live ones notice the closed group at once."""
        self._leave()
        return calls.settle(ANSWER_MARGIN_S)

    def _drop_breaker(
        self,
        members: Sequence[Member],
        failures: Mapping[Member, InstanceError],
        known: Member | None,
        lost: Sequence[Member],
        problem: str,
    ) -> None:
        """Drops those that broke a group amid a stream; nobody, where nothing tells who that was, the first time.

        Args:
            failures: of all updates, the earliest first.
            known: whom the sender names.
            lost: those whose connections ended before the rest was ended, the first one first.
            problem: why the sender ended the stream.
        """
        if not failures or (known is not None and not stood_still_s(problem)):
            suspects = list(members) if known is None else [known]
            claim = "it answered that it had received all before all was sent"
            failures = {m: failures.get(m, InstanceError(f"instance {m.url}: {claim}")) for m in suspects}
        else:
            in_order = [*(member for member in lost if member in failures), *failures]
            own = [member for member in in_order if BROKE not in str(failures[member])]
            suspects = own[:1] or _who_stood_still(failures, problem)
            if not suspects and self._tries_again(members, problem):
                return
            suspects = suspects or in_order[:1]
        self._drop_guilty(failures, suspects, problem)

    def _tries_again(self, members: Sequence[Member], problem: str) -> bool:
        """Whether nobody is left out of a group that ran out of time, though no instance stood still: the first time.

        Raises:
            PublishError: it is the second time in a row, and the sender itself stood still.
        """
        is_first, self._unexplained = self._unexplained != list(members), list(members)
        if is_first:
            logger.warning(
                "the weight group ran out of time, no instance stood still, all are tried again: %s", problem
            )
        elif stood_still_s(problem):
            raise PublishError(
                f"the weight group broke twice because the trainer did nothing for it: {problem}; give each step more "
                "time (publish.timeout_s)"
            )
        return is_first

    def _drop_guilty(self, failures: Mapping[Member, InstanceError], suspects: Iterable[Member], problem: str) -> None:
        """Drops the instances that broke a group: those that are unreachable, else the suspects."""
        if not failures:
            raise PublishError(f"the weight group broke, though no instance failed: {problem}")
        of_sender = f"; the sender says: {problem}" if problem else ""
        unreachable = {
            member: InstanceUnreachable(f"{error}{of_sender}")
            for member, error in failures.items()
            if isinstance(error, InstanceUnreachable)
        }
        self._drop(unreachable or {member: WeightGroupBroken(f"{failures[member]}{of_sender}") for member in suspects})


def _who_stood_still(failures: Mapping[Member, InstanceError], problem: str) -> list[Member]:
    """The instance that did nothing for the longest time, by its own word; none if the sender did for longer."""
    seconds = {member: stood_still_s(error) for member, error in failures.items()}
    longest_s = max(seconds.values(), default=0.0)
    return [m for m, each_s in seconds.items() if each_s == longest_s > stood_still_s(problem)][:1]


def _number_of(version: str) -> str:
    """The number alone of an NCCL version such as "2.29.7 (torch 2.13.0)"."""
    return version.partition(" ")[0]
