"""Weights that the pipeline stages of a trainer send at once, each over a weight group of its own to all instances.

The main rank hosts the stores of all these groups, and sends the first stage's weights; the first rank of each further
stage is rank 0 of its stage's group. So the main rank's link carries a part of the model only, and other stages' parts
do not pass through its memory. An instance that leaves one group leaves all. What a rank of experts sends itself is a
stage of its own here.
"""

import heapq
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import xxhash

from async_rl.errors import PublishError
from async_rl.shared.protocol.group_errors import stood_still_s
from async_rl.shared.protocol.sender import Sent
from async_rl.shared.weights.collectives import current_device
from async_rl.shared.weights.fingerprint import Stream, TensorSpec
from async_rl.shared.weights.messages import bucket_bytes_of
from async_rl.shared.weights.store import join_rendezvous
from async_rl.shared.weights.stream import WeightGroup

log = logging.getLogger(__name__)

FORMED = "formed"
"""Set in a further stage's store by its sender, when all members have connected."""


@dataclass(frozen=True, slots=True)
class StageInvitation:
    """How the sender of a further stage joins the group that has been made for it."""

    address: str
    port: int
    secret: str
    world_size: int
    backend: str
    timeout_s: float
    patience_s: float
    """For the instances to come: they join the groups of the stages before first."""


@dataclass(frozen=True, slots=True)
class StageSent:
    """A stage's part of a stream; or `problem`: why its group broke."""

    fingerprint: str = ""
    num_bytes: int = 0
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class StageSource:
    """The main rank's access to the other stages, which take part in both calls."""

    stages: Sequence[int]
    """The stage that sends each tensor of the stream, in its order."""
    hosts: Sequence[str]
    """Of the further stages' senders: an address of each one's host."""
    invite: Callable[[Sequence[StageInvitation]], None]
    """Lets each further stage's sender join, in their order; does not wait for them."""
    send: Callable[[Callable[[Stream], StageSent]], list[StageSent]]
    """Sends the main rank's part by the given function, while the others send theirs; of all stages, in order."""

    @property
    def num_stages(self) -> int:
        return len(self.hosts) + 1


def send_part(group: WeightGroup, backend: str, stream: Stream) -> StageSent:
    """Sends one stage's part of a stream."""
    try:
        fingerprint = group.send(stream, bucket_bytes_of(backend))
    except PublishError as error:
        # As text, because its traceback would keep the broken group's connections open.
        return StageSent(problem=str(error))
    return StageSent(fingerprint, group.num_bytes_sent)


def put_together(parts: Sequence[StageSent]) -> Sent:
    """What all stages have sent; or the problem of the one that stood still for longest."""
    problems = [part.problem for part in parts if part.problem is not None]
    if problems:
        return Sent(problem=max(problems, key=stood_still_s))
    fingerprint = fingerprint_of_stages([part.fingerprint for part in parts])
    return Sent(fingerprint, num_bytes=sum(part.num_bytes for part in parts))


def fingerprint_of_stages(fingerprints: Sequence[str]) -> str:
    """Over the streams of all stages, by that of each; of one stage it is that one's."""
    if len(fingerprints) == 1:
        return fingerprints[0]
    return xxhash.xxh3_128("".join(fingerprints).encode()).hexdigest()


def by_turns(
    parts: Sequence[Sequence[TensorSpec]], tensors: Sequence[Iterator[tuple[TensorSpec, torch.Tensor] | None]]
) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """Yields the tensors of all parts of a stream, each from `WeightGroup.begin_to_receive`: always the one with which
    its part has come to the smallest share of its bytes, so that a large one is on its way while smaller ones of the
    other parts are taken, and in an order that is the same for every receiver."""
    for each in tensors:
        next(each)
    for _, number in heapq.merge(*(_turns(number, part) for number, part in enumerate(parts))):
        found = next(tensors[number])
        assert found is not None, "only the first is none"
        yield found
    for each in tensors:
        next(each, None)


def _turns(number: int, part: Sequence[TensorSpec]) -> Iterator[tuple[float, int]]:
    """For each tensor of a part: the share of its bytes that has come with it, and the part's number."""
    come = list(accumulate(spec.num_bytes for spec in part))
    for each in come:
        yield each / max(come[-1], 1), number


class StageSender:
    """On the first rank of a further stage: its membership in the weight group of its stage."""

    def __init__(self) -> None:
        self._meeting: _Meeting | None = None

    def join(self, invitation: Mapping[str, Any]) -> None:
        """Leaves the present group and begins to join another, in a thread; takes the fields of a `StageInvitation`."""
        self.leave()
        self._meeting = _Meeting(StageInvitation(**invitation))

    def send(self, stream: Stream) -> StageSent:
        """Leaves the group if it broke. The main rank calls for it when all groups are formed."""
        meeting = self._meeting
        if meeting is None or meeting.group is None:
            return StageSent(problem="this stage is in no weight group")
        sent = send_part(meeting.group, meeting.invitation.backend, stream)
        if sent.problem is not None:
            self.leave()
        return sent

    def leave(self) -> None:
        """Closes the group, if there is one, or as soon as it is formed."""
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            meeting.leave()


class _Meeting:
    """Joins in a thread, because the rendezvous blocks, and its host may call it off."""

    def __init__(self, invitation: StageInvitation) -> None:
        self.invitation = invitation
        self.group: WeightGroup | None = None
        self._has_left = False
        self._lock = threading.Lock()
        self._device = current_device(invitation.backend)
        threading.Thread(target=self._meet, name="async-rl-rendezvous", daemon=True).start()

    def leave(self) -> None:
        with self._lock:
            self._has_left = True
            group, self.group = self.group, None
        if group is not None:
            group.close()

    def _meet(self) -> None:
        its = self.invitation
        try:
            store = join_rendezvous(its.address, its.port, its.secret, its.patience_s)
            group = WeightGroup(store, 0, its.world_size, its.backend, its.timeout_s, self._device)
        except PublishError as error:
            # The host of the store sees that this member has gone, or does not come.
            log.warning("this stage's weight group was not formed: %s", error)
            return
        with self._lock:
            if not self._has_left:
                self.group = group
        try:
            store.set(FORMED, "")
        except PublishError as error:
            log.warning("this stage's weight group was called off: %s", error)
        if self._has_left:
            group.close()
