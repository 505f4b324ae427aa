"""Moves one version of the weights from the trainer to every instance of the pool, once per period.

The main thread calls it and does the broadcast; the HTTP calls run on the producer's event loop, to all at once:

    join the weight group (kept from publish to publish) -> pause -> start -> update, with the broadcast beside it
    -> compare fingerprints -> finish with the version -> resume -> read the version back

An instance that fails a step leaves the pool with the reason. Where that broke the group, the rest form a new one and
receive everything again; no instance goes into service with anything but the whole stream.
"""

import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from async_rl.config import PublishSection
from async_rl.errors import InstanceError, InstanceRefused, InstanceUnreachable, PublishError
from async_rl.event_loop import EventLoopThread
from async_rl.instance_calls import InstanceCalls
from async_rl.pool import InferencePool, Member
from async_rl.protocol import UpdateInfo
from async_rl.types import Publication, WeightVersion
from async_rl.weight_room import Rendezvous, WeightRoom
from async_rl.weight_stream import TensorSpec

T = TypeVar("T")
MakeStream = Callable[[], Iterator[tuple[TensorSpec, torch.Tensor]]]

PROBE_TIMEOUT_S = 5.0
POLL_S = 0.002
EARLY = 0.8
"""Who refuses to join within this part of the timeout does so for a reason of its own."""

ANSWER_MARGIN_S = 5.0
"""How much longer than its own timeout an instance may take to answer: its error tells more than our giving up."""

MAX_FAILED_PUBLISHES = 3
"""An instance that failed so many publishes in a row is not asked again: it would slow down every further one."""


class Publisher:
    """Publishes to the instances of `pool`; one call at a time, from the main thread."""

    def __init__(
        self, pool: InferencePool, loop: EventLoopThread, config: PublishSection, backend: str = "gloo"
    ) -> None:
        self._pool = pool
        self._loop = loop
        self._config = config
        self._backend = backend
        self._answer_timeout_s = config.timeout_s + ANSWER_MARGIN_S
        self._room: WeightRoom | None = None
        self._dropped: dict[Member, str] = {}

    def publish(self, version: WeightVersion, specs: Sequence[TensorSpec], make_stream: MakeStream) -> Publication:
        """Puts `version` on every instance that is reachable, and exactly those in service.

        Args:
            specs: the tensors of the stream, in its order.
            make_stream: starts the stream; called again where a broken group makes the rest receive it again.

        Raises:
            PublishError: no instance received the weights; lists each one's reason.
        """
        started = time.monotonic()
        self._dropped = {}
        info = UpdateInfo(
            names=[spec.name for spec in specs],
            dtype_names=[spec.dtype_name for spec in specs],
            shapes=[list(spec.shape) for spec in specs],
        )
        members = self._reachable()
        fingerprint = None
        while members and fingerprint is None:
            fingerprint = self._move(members, info, make_stream)
            members = self._remaining(members)
        if fingerprint is not None:
            expected = fingerprint
            self._ask(members, lambda member: self._put_in_service(member, expected, version))
            members = self._remaining(members)
        self._pool.set_version(version, [member.url for member in members])
        if fingerprint is None or not members:
            reasons = "".join(f"\n  {member.url}: {reason}" for member, reason in self._dropped.items())
            raise PublishError(f"weight version {version!r} reached no instance:{reasons}")
        urls = tuple(member.url for member in members)
        num_bytes = sum(spec.num_bytes for spec in specs)
        return Publication(version, fingerprint, urls, num_bytes, time.monotonic() - started)

    def close(self) -> None:
        """Leaves the weight group; the instances notice with their next update."""
        if self._room is not None:
            self._room.group.close()
            self._room = None

    def _reachable(self) -> list[Member]:
        """The instances in service, and those out of it that answer."""
        members = list(self._pool.members)
        for member in members:
            if member.failed_publishes >= MAX_FAILED_PUBLISHES:
                self._dropped[member] = (
                    f"given up after {MAX_FAILED_PUBLISHES} failed publishes: {member.out_of_service}"
                )
        absent = [member for member in self._remaining(members) if member.out_of_service is not None]
        calls = InstanceCalls(self._loop, absent, _require_answer)
        self._dropped |= {member: str(error) for member, error in calls.settle(timeout_s=None).items()}
        return self._remaining(members)

    def _move(self, members: list[Member], info: UpdateInfo, make_stream: MakeStream) -> str | None:
        """One try to send the stream to all of `members`: its fingerprint, or None if the group did not hold.

        Drops those that prevented it, at least one, or that failed without harm to the others.
        """
        if (self._room is None or self._room.members != set(members)) and not self._join(members):
            return None
        assert self._room is not None
        self._room.group.next_update()
        calls = InstanceCalls(self._loop, members, lambda member: self._receive(member, info))
        try:
            if not self._all_accept(calls):
                return None
            fingerprint, problem = self._send(make_stream)
            if problem is None:
                self._drop(calls.settle(self._answer_timeout_s))
            else:
                failures = self._break_off(calls)
                # Who fails first breaks the others' connections; they are not to blame.
                self._drop_guilty(failures, list(failures)[:1], problem)
            return fingerprint
        finally:
            if calls.cancel():
                # The stream itself failed or the user gave up, with receivers waiting for the rest.
                self.close()

    def _join(self, members: list[Member]) -> bool:
        """Forms a weight group with all of `members`; False after dropping those that prevented it."""
        self.close()
        sizes = self._ask(members, lambda member: member.client.world_size(self._config.timeout_s))
        if len(sizes) < len(members):
            return False
        meeting = Rendezvous(sizes, self._config, self._backend)
        calls = InstanceCalls(
            self._loop,
            members,
            lambda member: member.client.init_weight_transfer(meeting.invitation(member), self._answer_timeout_s),
        )
        deadline = time.monotonic() + EARLY * self._config.timeout_s
        try:
            while not meeting.wait(POLL_S) and not calls.failures():
                pass
            # Late refusals only say that somebody else did not come.
            refused = calls.failures() if time.monotonic() < deadline else {}
            if refused:
                meeting.call_off(len(refused))
            failures = calls.settle(self._answer_timeout_s)
        finally:
            calls.cancel()
        self._room = meeting.room()
        if refused:
            self._drop(refused)
        elif failures or self._room is None:
            self._drop_guilty(failures, failures, meeting.problem)
        return self._room is not None and not failures

    async def _receive(self, member: Member, info: UpdateInfo) -> None:
        await member.client.pause(self._answer_timeout_s)
        refused = None
        try:
            await member.client.start_weight_update(self._answer_timeout_s)
        except InstanceRefused as error:
            # An update that an earlier try or trainer left open may go on: this stream carries every tensor.
            refused = error
        try:
            await member.client.update_weights(info)
        except InstanceError as error:
            raise error if refused is None else InstanceError(f"{error}; before that: {refused}") from refused

    def _all_accept(self, calls: InstanceCalls[None]) -> bool:
        """Waits until every worker is about to receive; otherwise breaks the group off and drops who refuses."""
        assert self._room is not None
        deadline = time.monotonic() + self._config.timeout_s
        while missing := self._room.missing():
            if refused := calls.failures():
                self._break_off(calls)
                self._drop(refused)
                return False
            if time.monotonic() > deadline:
                calls.cancel(missing)
                self._break_off(calls)
                reason = f"it did not accept the list of tensors within {self._config.timeout_s:g} s"
                self._drop(dict.fromkeys(missing, reason))
                return False
            time.sleep(POLL_S)
        return True

    def _break_off(self, calls: InstanceCalls[None]) -> dict[Member, InstanceError]:
        """Ends an update for everybody; how each one's call failed. Those that live notice the closed group at once."""
        self.close()
        return calls.settle(ANSWER_MARGIN_S)

    def _send(self, make_stream: MakeStream) -> tuple[str, None] | tuple[None, str]:
        """Broadcasts the stream: its fingerprint, or what broke the group.

        The error is returned as text, because its traceback would keep the broken group's connections open.
        """
        assert self._room is not None
        try:
            return self._room.group.send(make_stream(), self._config.bucket_bytes), None
        except PublishError as error:
            return None, str(error)

    async def _put_in_service(self, member: Member, fingerprint: str, version: WeightVersion) -> None:
        client, timeout_s = member.client, self._config.timeout_s
        received = await client.weight_fingerprints(timeout_s)
        if not received or set(received) != {fingerprint}:
            raise InstanceError(
                f"instance {member.url} received weights with fingerprints {received}, sent was {fingerprint!r}"
            )
        await client.finish_weight_update(version, timeout_s)
        await client.resume(timeout_s)
        if (actual := await client.weight_version(timeout_s)) != version:
            raise InstanceError(f"instance {member.url} reports weight version {actual!r} after publishing {version!r}")

    def _ask(self, members: Sequence[Member], call: Callable[[Member], Coroutine[Any, Any, T]]) -> dict[Member, T]:
        """Answers of those that answered; the others are dropped. The calls bound themselves."""
        calls = InstanceCalls(self._loop, members, call)
        self._drop(calls.settle(timeout_s=None))
        return calls.results()

    def _drop_guilty(self, failures: Mapping[Member, InstanceError], suspects: Iterable[Member], problem: str) -> None:
        """Drops who broke a group: those that are unreachable, else the suspects.

        Raises:
            PublishError: nobody failed, so the fault is on this side.
        """
        if not failures:
            raise PublishError(f"the weight group broke, though no instance failed: {problem}")
        unreachable = {m: error for m, error in failures.items() if isinstance(error, InstanceUnreachable)}
        self._drop(unreachable or {member: failures[member] for member in suspects})

    def _drop(self, reasons: Mapping[Member, object]) -> None:
        for member, reason in reasons.items():
            self._dropped[member] = str(reason)
            member.failed_publishes += 1
            self._pool.take_out(member, str(reason))

    def _remaining(self, members: Iterable[Member]) -> list[Member]:
        return [member for member in members if member not in self._dropped]


async def _require_answer(member: Member) -> None:
    try:
        await member.client.health(PROBE_TIMEOUT_S)
    except InstanceRefused as error:
        # 503: it runs, and a broken update may be why it cannot serve; a whole one mends that.
        if error.status != 503:
            raise
