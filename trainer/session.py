"""Builds the objects of one training rank from a config and runs the loop on them.

The main rank starts the producer and publishes through it; each replica's leader gets its groups from it.
"""

import json
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from functools import partial

from async_rl.checks.preflight.resume import Contents
from async_rl.config.secrets import masked
from async_rl.config.sections import Config, RunSection
from async_rl.config.train_section import TrainSection
from async_rl.errors import RunDirInUse
from async_rl.loop import RolloutSource
from async_rl.method.ledger import Ledger
from async_rl.method.proof.gap_limits import noise_limits
from async_rl.method.types import WeightVersion
from async_rl.producer.client import Control, RemoteRecorder, RemoteRolloutSource
from async_rl.producer.process import ProducerAddress, ProducerProcess
from async_rl.records.notices import recorded_notices
from async_rl.records.recorder import Recorder
from async_rl.records.records import CONFIG, cut_run_records, holds_another_run, require_no_records, require_proofs
from async_rl.rollouts.data.prompts import PromptSource
from async_rl.rollouts.publish.remote_sender import serve
from async_rl.shared.checkpoint_names import checkpoints_dir, newest_checkpoint
from async_rl.shared.files import write_file
from async_rl.shared.locks.lease import TTL_S, Lease, take_lease
from async_rl.shared.locks.run_lock import lock_run, make_run_dir, may_be_replaced
from async_rl.shared.weights.collectives import BACKENDS
from async_rl.shared.weights.sender import WeightSender, WeightSource
from trainer.checkpoint.checkpoint import Checkpoints
from trainer.parallel import Parallel, address_for_ranks
from trainer.process_end import end_now
from trainer.prompt_data import begin_loading, load_prompts_and_contents
from trainer.rank import NoRolloutSource, TrainingRank, adapter_info, sender_hosts, weight_source
from trainer.recovery import OwnProducer, ProducerHandle, Recovery, Replicas, Restart
from trainer.saving import Saving
from trainer.shared_directory import require_shared
from trainer.shutdown import Shutdown
from trainer.stop_signal import StopSignal
from trainer.trainer import MegatronTrainer

log = logging.getLogger(__name__)

StartProducer = Callable[[Config, str, str], ProducerHandle]
"""(config, lease, this host's address) -> the producer, which was started."""


@dataclass(frozen=True, slots=True)
class Session:
    """The arguments of `async_rl.loop.train`, built and connected."""

    train: TrainSection
    """That of the config; with the number of iterations, if the config has epochs."""
    megatron: MegatronTrainer
    rank: TrainingRank
    prompts: PromptSource
    rollouts: RolloutSource
    ledger: Ledger
    recorder: Recorder
    saving: Saving
    recovery: Recovery
    control: Control | None
    """The main rank's, of the producer."""

    def evaluate_trained(self, version: WeightVersion) -> None:
        """Evaluates the trained weights, which the pool serves as `version`, on the main rank.

        Raises:
            WaitTimedOut: that took too long.
        """
        if self.control is not None:
            self.control.call("evaluate_trained", version)


@contextmanager
def open_session(
    config: Config,
    parallel: Parallel,
    shutdown: Shutdown | None = None,
    start: StartProducer = ProducerProcess,
) -> Iterator[Session]:
    """Loads model and data, waits for the instances, and closes everything at exit.

    Args:
        shutdown: notifies all ranks that the run ends; by default one that no signal triggers.
        start: starts the producer, on the main rank.

    Raises:
        ConfigError: model, data, reward, layout or lengths are not usable; found before any training.
        NoInstanceLeft: no instance became healthy within `pool.timeout_s`.
        RunDirInUse: another trainer uses the run's directory.
    """
    shutdown = shutdown or Shutdown(parallel, StopSignal(), config.checkpoint.grace_s)
    with ExitStack() as closing:
        lease = closing.enter_context(_claim(config.run)) if parallel.is_main else None
        require_lease = lease.require if lease is not None else _do_nothing
        producer = control = mine = None
        if lease is not None:
            producer = _start_producer(closing, config, partial(start, config, lease.name, address_for_ranks()))
            control = producer.control
            # The id is unique per start, so that an instance of an earlier start is never taken for one of this start.
            mine = [secrets.token_hex(4), lease.name, lease.term, astuple(producer.address)]
        if config.run.placement == "turns":
            # No rank takes memory on its device before instances of an earlier start have left it.
            parallel.broadcast_json([] if parallel.is_main else None)
        # Epochs are counted with the prompts, and the learning rate's schedule needs their number.
        megatron = MegatronTrainer.of(config, parallel) if config.train.epochs is None else None
        prompts, contents = load_prompts_and_contents(config, parallel, control)
        counted = _counted(config, len(prompts))
        megatron = megatron or MegatronTrainer.of(counted, parallel)
        run_id, lease_name, term, address_of_producer = parallel.broadcast_json(mine)
        if config.checkpoint.every or config.run.resume:
            require_shared(config.run.dir, lease_name, parallel)
        saving = _open_saving(closing, config, counted, parallel, megatron, prompts, contents, term, require_lease)
        if producer is not None:
            replicas = Replicas(parallel.num_replicas, megatron.training_pool, megatron.cuts_groups)
            producer.open(saving.first_iteration, replicas)
        # Nobody asks the producer for groups before it is ready.
        parallel.broadcast_json([] if parallel.is_main else None)
        rollouts = None
        if parallel.is_leader:
            rollouts = _connect(closing, config, parallel, shutdown, ProducerAddress(*address_of_producer))
        # Other ranks only measure times.
        publish, recorder, restart = None, Recorder(), None
        source = _weight_source(config, parallel, megatron, shutdown)
        if producer is not None:
            sender = WeightSender(source, config.publish, run_id, BACKENDS[parallel.device.DEVICE.type])
            closing.callback(sender.close)
            publish = partial(producer.control.publish, serve=partial(serve, sender))
            recorder = RemoteRecorder(producer.control, require_lease)
            restart = Restart(config, producer, sender, contents, replicas, recorder, require_lease, shutdown.watch)
        rank = TrainingRank(megatron, parallel, run_id, publish, shutdown, require_lease)
        closing.callback(rank.close)
        yield Session(
            counted.train,
            megatron,
            rank,
            prompts,
            rollouts or NoRolloutSource(),
            make_ledger(config, parallel, require_lease),
            recorder,
            saving,
            Recovery(parallel, shutdown, megatron, saving, rollouts, restart, config.trainer.lost_after_s),
            control,
        )


def _start_producer(closing: ExitStack, config: Config, start: Callable[[], ProducerHandle]) -> OwnProducer:
    """Connected; it loads the data meanwhile."""
    producer = closing.enter_context(OwnProducer(start, config.trainer.lost_after_s))
    producer.connect()
    if config.run.placement == "turns":
        producer.control.call("rest")
    begin_loading(config, producer.control)
    return producer


def _weight_source(config: Config, parallel: Parallel, megatron: MegatronTrainer, shutdown: Shutdown) -> WeightSource:
    """The main rank's; all ranks call it together."""
    of_adapters = adapter_info(megatron, parallel, config.adapter)
    hosts = sender_hosts(megatron.export, parallel) if config.publish.transport == "stages" else None
    return weight_source(megatron, parallel, shutdown.watch, of_adapters, hosts)


def _counted(config: Config, num_prompts: int) -> Config:
    """With the number of iterations, if it has epochs."""
    counted = config.with_iterations(num_prompts)
    if config.train.epochs is not None:
        num_iterations = counted.train.num_iterations
        log.info("train.epochs = %g of %d prompts: %d iterations", config.train.epochs, num_prompts, num_iterations)
    return counted


def _connect(
    closing: ExitStack, config: Config, parallel: Parallel, shutdown: Shutdown, producer: ProducerAddress
) -> RemoteRolloutSource:
    """A leader's connection to the producer."""
    connection = producer.connect(config.trainer.lost_after_s, replica=parallel.dp_rank)
    by_index = config.train.order == "prompt"
    rollouts = RemoteRolloutSource(
        connection, shutdown.watch, parallel.dp_rank, parallel.num_replicas, by_index=by_index
    )
    # Another one, if the producer was replaced.
    closing.callback(lambda: rollouts.connection.close())
    return rollouts


def _open_saving(
    closing: ExitStack,
    config: Config,
    counted: Config,
    parallel: Parallel,
    megatron: MegatronTrainer,
    prompts: PromptSource,
    contents: Contents,
    term: int,
    require_lease: Callable[[], None],
) -> Saving:
    """Loads the newest checkpoint if the run resumes; the main rank cuts the records to it.

    Args:
        counted: the config with its number of iterations, which a checkpoint does not hold it to.
    """
    checkpoints = Checkpoints(
        checkpoints_dir(config.run.dir),
        config.checkpoint.keep,
        parallel,
        config,
        contents,
        term=term,
        require_lease=require_lease,
    )
    closing.callback(checkpoints.close)
    saving = Saving(checkpoints, megatron, config.run, counted.train, config.checkpoint)
    if parallel.is_main:
        write_file(config.run.dir / CONFIG, json.dumps(masked("", counted.model_dump(mode="json")), indent=1) + "\n")
        num_cut = cut_run_records(config.run.dir, saving.first_iteration)
        require_proofs(config.run.dir, saving.first_iteration, accept=config.run.accept_changes)
        log.info("starting at iteration %d, %d later records removed", saving.first_iteration, num_cut)
    return saving


def make_ledger(config: Config, parallel: Parallel, require_lease: Callable[[], None] = lambda: None) -> Ledger:
    """Checks on every rank, and writes on the main rank."""
    path = config.run.dir / "ledger.jsonl" if parallel.is_main else None
    limits = noise_limits(config.train, config.model.dtype)
    return Ledger(path, config.rollout.responses_per_prompt, limits, require_lease)


@contextmanager
def _claim(run: RunSection) -> Iterator[Lease]:
    """Creates a run's directory and holds the lease on it; refuses a directory that another run uses, and one with
    records of another run, unless this run resumes it.

    The process ends at once when another trainer has taken over.
    """
    make_run_dir(run.dir)
    with ExitStack() as closing:
        try:
            closing.enter_context(lock_run(run.dir))
        except RunDirInUse:
            if not may_be_replaced(run.dir):
                raise
        lease = take_lease(run.dir, TTL_S)
        closing.callback(lease.release)
        lease.keep(end_now)
        if not run.resume:
            require_no_records(run)
            if newest_checkpoint(checkpoints_dir(run.dir)):
                raise holds_another_run(run)
        closing.enter_context(recorded_notices(run.dir))
        yield lease


def _do_nothing(*_: object) -> None:
    return None
