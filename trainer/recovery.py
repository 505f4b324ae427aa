"""A producer that is lost while the ranks train is started again, and the iteration that it left unfinished repeated.

All ranks keep their weights: what they have accumulated is discarded, the records of the unfinished iteration are cut,
and the loop begins it anew: with a publish under a new version, and all rollouts from the same seeds. So no batch is
half of one producer and half of another, and the run trains what it would have trained.

The old producer is killed, and has ended, before the new one is started: of both only one can ever write, or ask an
instance for something. After the last step of a batch the iteration is whole: another producer writes its record, and
the next iteration begins. A loss after some of several steps, or a second one in the same iteration, ends the run as
any other fault does (`shutdown.py`).
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol

from async_rl.checks.preflight.resume import Contents, content_changes
from async_rl.config.sections import Config
from async_rl.errors import AsyncRLError, ConfigError, Fenced, LeaderFailed, ProducerLost, RunStopped
from async_rl.producer.client import Control, RemoteRecorder, RemoteRolloutSource
from async_rl.producer.process import END_TIMEOUT_S, ProducerAddress
from async_rl.records.records import cut_record_of, cut_run_records
from async_rl.records.throughput import TrainingPool
from async_rl.shared.weights.sender import WeightSender
from trainer.parallel import Parallel
from trainer.prompt_data import begin_loading, contents_of
from trainer.saving import Saving
from trainer.shutdown import Shutdown
from trainer.trainer import MegatronTrainer

log = logging.getLogger(__name__)

MAX_LOSSES = 1
"""Of producers, without a whole iteration in between: what ends a second one at the same place, such as a host without
memory or a reward that kills its process, will end a third one. Launchers restart the run then: more and more slowly,
and not for ever."""


class ProducerHandle(Protocol):
    """The process of a producer; see `ProducerProcess`."""

    def address(self, watch: Callable[[], None]) -> ProducerAddress: ...

    def end(self, timeout_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Replicas:
    """What a producer has to know of the training ranks: see `ProducerService.open`."""

    num_replicas: int
    training_pool: TrainingPool
    cuts_groups: bool


class OwnProducer:
    """The main rank's producer: its process and the control connection. A context manager, which ends both.

    Args:
        start: starts the process.
    """

    def __init__(self, start: Callable[[], ProducerHandle], lost_after_s: float) -> None:
        self._start = start
        self._lost_after_s = lost_after_s
        self._process = start()
        self._is_open = False
        self._fleet_port: int | None = None
        self._control: Control | None = None
        self.address: ProducerAddress
        """Known after `connect`."""

    @property
    def control(self) -> Control:
        """The same object whichever producer there is."""
        assert self._control is not None, "it is connected"
        return self._control

    def __enter__(self) -> "OwnProducer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._control is not None:
            self._control.close()
            if self._control.is_lost:
                self._process.end(0.0)
                return
        # One that has not been opened has nothing to end in order.
        after_error_s = self._lost_after_s if self._is_open else 0.0
        self._process.end(END_TIMEOUT_S if kind is None else after_error_s)

    def connect(self, watch: Callable[[], None] = lambda: None) -> None:
        """Waits until it listens.

        Raises:
            ConfigError, ProducerLost: as `ProducerProcess.address` and `ProducerAddress.connect`.
        """
        self.address = self._process.address(watch)
        connection = self.address.connect(self._lost_after_s)
        if self._control is None:
            self._control = Control(connection)
        self._control.connection = connection
        self._control.is_lost = False

    def open(
        self,
        first_iteration: int,
        replicas: Replicas,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        """Waits for the instances and opens the fleet endpoint, always at the same port: `ProducerService.open`."""
        pool = replicas.num_replicas, replicas.training_pool, replicas.cuts_groups
        self._fleet_port = self.control.call("open", first_iteration, *pool, self._fleet_port, watch=watch)
        self._is_open = True

    def replace(self, watch: Callable[[], None]) -> None:
        """Kills the process, waits for its end, and starts another one; raises as `connect`."""
        self._is_open = False
        self.control.close()
        self._process.end(0.0)
        self._process = self._start()
        self.connect(watch)


@dataclass(frozen=True, slots=True)
class Restart:
    """What the main rank does for another producer."""

    config: Config
    producer: OwnProducer
    sender: WeightSender
    contents: Contents
    replicas: Replicas
    recorder: RemoteRecorder
    require_lease: Callable[[], None]
    watch: Callable[[], None]

    def __call__(self, iteration: int) -> list[Any]:
        """Replaces the producer by one that is ready for `iteration`; returns its address.

        Raises:
            ConfigError: the prompts or the reward are others than before.
            AsyncRLError: it does not start, finds no instance, or the run has to end.
        """
        config, producer = self.config, self.producer
        self.require_lease()
        # Instances that wait for the rest of a stream stop waiting; the next publish forms a group of its own.
        self.sender.leave_group()
        producer.replace(self.watch)
        begin_loading(config, producer.control)
        loaded = producer.control.result(watch=self.watch)
        now = contents_of(config, loaded, self.contents.algorithm)
        if changes := content_changes(self.contents.as_json(), now):
            raise ConfigError("the run's inputs have changed since it was started:\n  " + "\n  ".join(changes))
        self.require_lease()
        num_cut = cut_run_records(config.run.dir, iteration)
        if (unwritten := self.recorder.first_unwritten) is not None:
            cut_record_of(config.run.dir, unwritten)
        log.info("%d records of the unfinished iteration removed", num_cut)
        producer.open(iteration, self.replicas, self.watch)
        self.recorder.write_kept()
        return list(astuple(producer.address))


@dataclass(frozen=True, slots=True)
class RankState:
    """How one rank stands after an error."""

    error: str
    """Its class."""
    text: str
    is_stop_requested: bool
    iteration: int
    """The first that is not whole."""
    is_sound: bool
    """Whether the weights are those that this iteration begins with."""


def obstacle(ranks: Sequence[RankState], num_losses: int) -> str | None:
    """Why the iteration cannot be repeated with another producer; None if it can.

    Args:
        ranks: all of them.
        num_losses: of producers in this iteration, before this one.
    """
    others = [rank for rank in ranks if rank.error not in (ProducerLost.__name__, LeaderFailed.__name__)]
    if others:
        return f"a training rank failed by another error: {others[0].error}: {others[0].text}"
    if all(rank.error == LeaderFailed.__name__ for rank in ranks):
        return "it is not the producer that was lost"
    if len({rank.iteration for rank in ranks}) > 1 or not all(rank.is_sound for rank in ranks):
        return "some of the steps of a batch were taken, and not all"
    if num_losses >= MAX_LOSSES:
        return f"it was lost before in iteration {ranks[0].iteration}"
    return None


class Recovery:
    """One rank's part in it; all ranks create it.

    Args:
        rollouts: a leader's.
        restart: on the main rank only: starts another producer for an iteration, and returns its address.
    """

    def __init__(
        self,
        parallel: Parallel,
        shutdown: Shutdown,
        megatron: MegatronTrainer,
        saving: Saving,
        rollouts: RemoteRolloutSource | None,
        restart: Callable[[int], list[Any]] | None,
        lost_after_s: float,
    ) -> None:
        self._parallel = parallel
        self._shutdown = shutdown
        self._megatron = megatron
        self._saving = saving
        self._rollouts = rollouts
        self._restart = restart
        self._lost_after_s = lost_after_s

    def train(self, loop: Callable[[int], None]) -> None:
        """Runs `loop`, which trains from an iteration on to the end; again from the one that a lost producer left.

        Raises:
            AsyncRLError: any other error of it, or that of a loss that is not mended.
        """
        num_losses = Counter[int]()
        iteration = self._saving.first_iteration
        while True:
            try:
                if num_losses:
                    self._begin_again(iteration)
                loop(iteration)
                return
            except Fenced:
                # The other ranks end without this one.
                raise
            except AsyncRLError as error:
                iteration = self._require_mendable(error, num_losses)
                num_losses[iteration] += 1

    def _require_mendable(self, error: AsyncRLError, num_losses: Mapping[int, int]) -> int:
        """Meets the other ranks; returns the iteration that all of them repeat.

        Raises:
            RunStopped: a rank was told to end meanwhile.
            AsyncRLError: `error`, if the run cannot go on.
        """
        saving = self._saving
        own = RankState(
            type(error).__name__, str(error), self._shutdown.is_requested, saving.first_unsound, saving.is_sound
        )
        try:
            ranks = [RankState(**each) for each in self._shutdown.gather_after(error, asdict(own))]
        except RuntimeError as gone:
            log.info("the other training ranks cannot be asked how they stand: %s", gone)
            raise error from gone
        lost = next((rank for rank in ranks if rank.error == ProducerLost.__name__), None)
        if (why := obstacle(ranks, num_losses.get(own.iteration, 0))) is not None:
            if lost is not None and self._parallel.is_main:
                log.error("the producer was lost, and is not started again beside the training ranks: %s", why)
            raise error
        assert lost is not None, "then it would be an obstacle"
        if stopped := [number for number, rank in enumerate(ranks) if rank.is_stop_requested]:
            raise RunStopped(f"training rank {stopped[0]} was told to end (SIGTERM)") from error
        self._shutdown.resume_run()
        if self._parallel.is_main:
            log.warning(
                "the producer was lost (%s): it is started again, and iteration %d begins anew; the training ranks "
                "keep their weights",
                lost.text,
                own.iteration,
            )
        return own.iteration

    def _begin_again(self, iteration: int) -> None:
        """Waits for the producer that is started; all ranks are together.

        Raises:
            AsyncRLError: the main rank's failure.
            LeaderFailed, RunStopped: the same, on the other ranks.
            ProducerLost: it is lost again.
        """
        began_s = time.monotonic()
        self._megatron.discard()
        self._saving.go_back()
        restart = None if self._restart is None else partial(self._restart, iteration)
        address = ProducerAddress(*self._shutdown.on_main_rank(restart))
        self._shutdown.separate()
        if self._rollouts is not None:
            self._rollouts.connection.close()
            self._rollouts.connection = address.connect(self._lost_after_s, replica=self._parallel.dp_rank)
        log.info("another producer serves after %.1f s", time.monotonic() - began_s)
