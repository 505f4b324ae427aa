"""The producer as the ranks of the trainer use it: groups, publishing and records, asked for over a connection."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import accumulate
from types import TracebackType
from typing import Any

from async_rl.errors import AsyncRLError, ProducerLost, WaitTimedOut
from async_rl.method.group_codec import unpack
from async_rl.method.group_proof import GroupProof
from async_rl.method.types import Batch, Group, Publication, WeightVersion
from async_rl.producer.connection import Connection
from async_rl.producer.frames import Carry, Message, answer_to, call_message, error_from_data
from async_rl.producer.sample_queue import SampleQueue
from async_rl.records.recorder import IterationRecord, Recorder

log = logging.getLogger(__name__)

POLL_S = 0.5
"""How often a wait looks whether the run has to end."""

LEAVE_TIMEOUT_S = 40.0
"""For the end of a batch's rollouts: it closes connections, and calls no instance or reward."""

MAX_IDLE_WORK_S = 5400.0
"""The longest that training waits for the work of the idle pool: its other ranks wait two hours at most."""


def _serve_nothing(name: str, arguments: Sequence[Any]) -> Any:
    raise AssertionError(f"the producer asks for {name} outside of a publish")


class Control:
    """The main rank's side: one call at a time, each of which the producer carries out before it takes the next.

    `connection` is replaced when the producer is.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.is_lost = False
        """Whether the producer was found to be lost."""

    def call(
        self, name: str, *arguments: Any, serve: Carry = _serve_nothing, watch: Callable[[], None] = lambda: None
    ) -> Any:
        """The result of the producer's `name`; see `producer.service`.

        Args:
            serve: does what the producer asks the trainer for meanwhile.
            watch: called while it waits; an exception that it raises ends the wait, and the connection is of no use
                any more.

        Raises:
            ProducerLost: it has ended or hangs.
            AsyncRLError: as it was raised there.
        """
        self.begin(name, *arguments)
        return self.result(serve, watch)

    def begin(self, name: str, *arguments: Any) -> None:
        """Begins a call, whose `result` is due before the next one."""
        with self._noting_a_loss():
            self.connection.send(call_message(name, arguments))

    def result(self, serve: Carry = _serve_nothing, watch: Callable[[], None] = lambda: None) -> Any:
        """That of the call that was begun; raises as `call`, or the internal error of `serve` that made it fail."""
        internal: Exception | None = None
        with self._noting_a_loss():
            while True:
                watch()
                match self.connection.receive(POLL_S):
                    case ({"call": _} as call, _):
                        answer, failure = answer_to(call, serve)
                        internal = internal or failure
                        self.connection.send(answer)
                    case ({"done": result}, _):
                        return result
                    case ({"failed": error}, _):
                        # Under no other name: whoever announces named errors to the other ranks would wait for them,
                        # while they are still in what failed here.
                        raise internal or error_from_data(error)

    @contextmanager
    def _noting_a_loss(self) -> Iterator[None]:
        try:
            yield
        except ProducerLost:
            self.is_lost = True
            raise

    def publish(self, version: WeightVersion, serve: Carry) -> Publication:
        """Has the producer put the weights in service, which asks `serve` for them.

        Raises:
            PublishError: no instance received them.
        """
        return publication_of(self.call("publish", version, serve=serve))

    def close(self) -> None:
        self.connection.close()


def publication_of(data: Mapping[str, Any]) -> Publication:
    """From its plain data."""
    return Publication(**{**data, "instances": tuple(data["instances"])})


class RemoteRecorder(Recorder):
    """Measures here, and has the producer write."""

    def __init__(self, control: Control, require_lease: Callable[[], None]) -> None:
        self._control = control
        self._require = require_lease
        self._unwritten: tuple[dict[str, Any], Publication] | None = None

    def keep_unwritten(self, record: IterationRecord, publication: Publication) -> None:
        """For `write_kept`, at another producer."""
        self._unwritten = record.as_data(), publication

    @property
    def first_unwritten(self) -> int | None:
        """The iteration of the record that was kept."""
        return None if self._unwritten is None else self._unwritten[0]["iteration"]

    def write_kept(self) -> None:
        """Has the record written that was kept, if there is one."""
        if self._unwritten is not None:
            self._control.call("end_iteration", *self._unwritten)
            self._unwritten = None

    def write_groups(self, record: IterationRecord, rows: Sequence[GroupProof]) -> None:
        self._require()
        self._control.call("write_groups", record.iteration, list(record.times.values()), rows)

    def end_iteration(self, record: IterationRecord, publication: Publication) -> None:
        self._require()
        self._control.call("end_iteration", record.as_data(), publication)


class RemoteRolloutSource:
    """A leader's `RolloutSource`: its replica's groups of each batch, from the producer.

    Args:
        connection: replaced when the producer is.
        watch: called while it waits; an exception that it raises ends the batch.
        replica: this one, of `num_replicas`; the first one says what is rolled out.
        by_index: whether groups are trained by index, and so have a replica of their own, for all of them or the first
            piece.
    """

    def __init__(
        self,
        connection: Connection,
        watch: Callable[[], None],
        replica: int = 0,
        num_replicas: int = 1,
        *,
        by_index: bool = False,
    ) -> None:
        self.connection = connection
        self.watch = watch
        self.replica = replica
        self._num_replicas = num_replicas
        self._by_index = by_index

    def start(self, mini_batches: Sequence[Batch], version: WeightVersion) -> "RemoteRun":
        """Has the whole batch dispatched to the instances that serve `version`; does not wait."""
        whole, share = (
            [part.prompts.keys() for part in parts]
            for parts in (mini_batches, [part.share(self.replica, self._num_replicas) for part in mini_batches])
        )
        if any(part.has_reserve for part in mini_batches):
            queue = SampleQueue(share, version)
        else:
            queue = SampleQueue(whole, version, needed=share if self._by_index else [()] * len(whole))
        return RemoteRun(self, mini_batches, version, queue)


class RemoteRun(AbstractContextManager["RemoteRun"]):
    """The running rollouts of a batch: a context manager that has this replica's groups.

    Leaving it, normally or by an error, ends the rest: running requests are closed, and the instances abort them.
    """

    def __init__(
        self, rollouts: RemoteRolloutSource, mini_batches: Sequence[Batch], version: WeightVersion, queue: SampleQueue
    ) -> None:
        self._connection = rollouts.connection
        self._watch = rollouts.watch
        self._iteration = mini_batches[0].iteration
        self._queue = queue
        start: Message = {"start": self._iteration}
        if rollouts.replica == 0:
            start |= {
                "version": version,
                "first_reserve": mini_batches[0].first_reserve,
                "mini_batches": [
                    [(index, prompt.prompt_id) for index, prompt in part.prompts.items()] for part in mini_batches
                ],
            }
        self._connection.send(start)

    def ready(self, wait: bool) -> list[Group]:
        """See `FinishedGroups.ready`.

        Raises:
            AsyncRLError: the producer's failure, or raised by `watch`.
            ProducerLost: it has ended, or hangs.
        """
        while True:
            while (frame := self._connection.receive(0.0)) is not None:
                self._note(*frame)
            groups = self._queue.pop_groups()
            if groups or not wait or self._queue.ends_mini_batch():
                return groups
            self._watch()
            if (frame := self._connection.receive(POLL_S)) is not None:
                self._note(*frame)

    def begin(self, groups: Sequence[Group]) -> None:
        """See `FinishedGroups.begin`."""
        self._connection.send({"begin": [group.key for group in groups]})

    def cancel(self, indices: Collection[int]) -> None:
        """See `FinishedGroups.cancel`; does not wait for the end of the rollouts, which the instances abort."""
        self._queue.cancel(indices)
        self._connection.send({"cancel": sorted(indices)})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Waits for the work of the idle pool if the batch was trained, and for the end of the running rollouts.

        Raises:
            WaitTimedOut: they do not end, and nothing else is being raised.
            ProducerLost: the same.
        """
        try:
            self._leave(waits=error is None)
        except (WaitTimedOut, ProducerLost) as late:
            if error is None:
                raise
            if isinstance(error, ProducerLost):
                return
            log.error("leaving the batch of iteration %d: %s", self._iteration, late)

    def _leave(self, *, waits: bool) -> None:
        """That the run has to end is raised by the next publish, after the iteration's record."""
        self._connection.send({"leave": waits})
        deadline = time.monotonic() + LEAVE_TIMEOUT_S + (MAX_IDLE_WORK_S if waits else 0.0)
        while time.monotonic() < deadline:
            match self._connection.receive(POLL_S):
                case ({"left": _}, _):
                    return
            if not waits:
                continue
            try:
                self._watch()
            except AsyncRLError as ending:
                log.warning("the work of the idle pool in iteration %d ends early: %s", self._iteration, ending)
                self._connection.send({"leave": False})
                waits, deadline = False, time.monotonic() + LEAVE_TIMEOUT_S
        raise WaitTimedOut(f"the producer did not end the rollouts of iteration {self._iteration} in time")

    def _note(self, message: Mapping[str, Any], body: bytes) -> None:
        match message:
            case {"groups": headers, "bytes": sizes}:
                offset_s = self._connection.clock_offset_s
                ends = list(accumulate(sizes))
                parts = [body[end - size : end] for end, size in zip(ends, sizes, strict=True)]
                for group in unpack(headers, *parts):
                    if offset_s:
                        started_s, finished_s = group.started_s + offset_s, group.finished_s + offset_s
                        group = replace(group, started_s=started_s, finished_s=finished_s)
                    self._queue.put(group)
            case {"complete": number}:
                self._queue.complete(number)
            case {"failed": error, "index": index}:
                # It may have been cancelled when it failed.
                if not (self._queue.has_all and self._queue.is_cancelled(index)):
                    raise error_from_data(error)
            case _:
                raise AssertionError(f"the producer says {message}")
