"""Builds the objects of one training rank from a config and runs the loop on them.

Each replica's leader has its own pool client, rewards and producer; only the main rank publishes and writes records.
"""

import json
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from async_rl.config.secrets import masked
from async_rl.config.sections import Config, RunSection
from async_rl.data.prompts import PromptSource, Tokenizer
from async_rl.errors import ConfigError, RunDirInUse
from async_rl.files import write_file
from async_rl.ledger import Ledger
from async_rl.loop import Rollouts
from async_rl.pool.inference_pool import InferencePool
from async_rl.proof.gap_limits import noise_limits
from async_rl.rewards import Reward, make_reward
from async_rl.tokenizer import load_tokenizer
from async_rl.tracking.lease import Lease, take_lease
from async_rl.tracking.notices import recorded_notices
from async_rl.tracking.recorder import Recorder
from async_rl.tracking.records import CONFIG, cut_run_records, holds_another_run, require_no_records
from async_rl.tracking.run_lock import lock_run, may_be_replaced
from async_rl.tracking.throughput import TrainingPool
from async_rl.tracking.trackers.choice import open_trackers
from async_rl.tracking.trackers.fan_out import Trackers
from async_rl.types import WeightVersion
from trainer.checkpoint.checkpoint import Checkpoints
from trainer.checkpoint.compatibility import Contents
from trainer.checkpoint.files import checkpoints_dir, newest_checkpoint
from trainer.ending import Ending
from trainer.leader import Leader
from trainer.model.shape import find_checkpoint
from trainer.parallel import Parallel
from trainer.process_end import end_now
from trainer.prompt_data import load_prompts_and_contents
from trainer.rank import NoRollouts, TrainingRank, weight_source
from trainer.saving import Saving
from trainer.shared_directory import require_shared
from trainer.stop_signal import StopSignal
from trainer.trainer import MegatronTrainer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Session:
    """The arguments of `async_rl.loop.train`, built and connected."""

    megatron: MegatronTrainer
    rank: TrainingRank
    prompts: PromptSource
    rollouts: Rollouts
    ledger: Ledger
    recorder: Recorder
    saving: Saving
    pool: InferencePool | None
    """A leader's."""
    evaluate_trained: Callable[[WeightVersion], None]
    """Evaluates the trained weights once the pool serves them, on the main rank."""


@contextmanager
def open_session(
    config: Config,
    parallel: Parallel,
    token: str | None = None,
    pool: InferencePool | None = None,
    ending: Ending | None = None,
) -> Iterator[Session]:
    """Loads model and data, waits for the instances, and closes everything at exit.

    Args:
        token: bearer token of the instances, if they require one.
        pool: a leader's pool, which is closed with the session; by default it is made from the config.
        ending: notifies all ranks that the run ends; by default one that no signal triggers.

    Raises:
        ConfigError: model, data, reward, layout or lengths are not usable; found before any training.
        NoInstanceLeft: no instance became healthy within `pool.timeout_s`.
        RunDirInUse: another trainer uses the run's directory.
    """
    config.require_prompts_for(parallel.num_ranks)
    ending = ending or Ending(parallel, StopSignal(), config.checkpoint.grace_s)
    with ExitStack() as closing:
        lease = closing.enter_context(_claim(config.run, config.cluster.lease_s)) if parallel.is_main else None
        require_lease = lease.require if lease is not None else _do_nothing
        reward = make_reward(config.reward)
        tokenizer, model_tokens = load_tokenizer(config.model.path, find_checkpoint(config.model.path))
        prompts, contents = load_prompts_and_contents(config, parallel, tokenizer)
        megatron = MegatronTrainer.of(config, parallel)
        # The id is unique per start, so that an instance of an earlier start is never taken for one of this start.
        mine = [secrets.token_hex(4), lease.name, lease.term] if lease is not None else None
        run_id, lease_name, term = parallel.broadcast_json(mine)
        if config.checkpoint.every or config.run.resume:
            require_shared(config.run.dir, lease_name, parallel)
        saving = _open_saving(closing, config, parallel, megatron, prompts, contents, term, require_lease)
        rollouts: Rollouts = NoRollouts()
        side = trackers = None
        if parallel.is_leader:
            run = lease.run if lease is not None else None
            pool = pool or InferencePool(config.pool, token, lease_name)
            pool.model_tokens = model_tokens
            side = Leader(closing, config, parallel, token, pool, run)
        fleet_url = parallel.broadcast_json(side.open_fleet() if side and parallel.is_main else None)
        if side is not None:
            side.wait_for_instances(fleet_url, prompts.longest)
            programs = side.programs(tokenizer, reward)
            evaluator = None
            if parallel.is_main:
                trackers = _open_trackers(closing, config, saving.first_iteration)
                evaluator = side.evaluator(tokenizer, reward, programs, prompts.held_out, require_lease, trackers)
            rollouts = side.producer(tokenizer, reward, programs, evaluator, ending.watch, require_lease)
        recorder = _make_recorder(
            config, parallel, side, reward, tokenizer, require_lease, megatron.training_pool, trackers
        )
        closing.callback(recorder.close)
        yield Session(
            megatron,
            TrainingRank(
                megatron,
                parallel,
                run_id,
                side.put_in_service if side else None,
                side.publisher(run_id, prompts.longest, weight_source(megatron, parallel))
                if side and parallel.is_main
                else None,
                ending,
                require_lease,
            ),
            prompts,
            rollouts,
            make_ledger(config, parallel, require_lease),
            recorder,
            saving,
            side.pool if side else None,
            side.evaluate_trained if side else _do_nothing,
        )


def _open_saving(
    closing: ExitStack,
    config: Config,
    parallel: Parallel,
    megatron: MegatronTrainer,
    prompts: PromptSource,
    contents: Contents,
    term: int,
    require_lease: Callable[[], None],
) -> Saving:
    """Loads the newest checkpoint if the run resumes; the main rank cuts the records to it."""
    checkpoints = Checkpoints(
        checkpoints_dir(config.run.dir),
        config.checkpoint.keep,
        parallel,
        config,
        contents,
        history=prompts.history,
        term=term,
        require_lease=require_lease,
    )
    closing.callback(checkpoints.close)
    saving = Saving(checkpoints, megatron, config.run, config.train, config.checkpoint)
    if parallel.is_main:
        write_file(config.run.dir / CONFIG, json.dumps(masked("", config.model_dump(mode="json")), indent=1) + "\n")
        num_cut = cut_run_records(config.run.dir, saving.first_iteration)
        log.info("starting at iteration %d, %d later records removed", saving.first_iteration, num_cut)
    return saving


def _open_trackers(closing: ExitStack, config: Config, first_iteration: int) -> Trackers:
    trackers = open_trackers(config.tracking, config.run.dir, first_iteration, config.model_dump(mode="json"))
    closing.callback(trackers.close)
    return trackers


def _make_recorder(
    config: Config,
    parallel: Parallel,
    side: Leader | None,
    reward: Reward,
    tokenizer: Tokenizer,
    require_lease: Callable[[], None],
    training_pool: TrainingPool,
    trackers: Trackers | None,
) -> Recorder:
    """Writes the records on the main rank; on other ranks it only measures times."""
    iterations = config.train.iterations
    if side is None or not parallel.is_main:
        return Recorder(None, iterations)

    def decode(token_ids: Sequence[int]) -> str:
        return tokenizer.batch_decode([list(token_ids)], skip_special_tokens=False)[0]

    return Recorder(
        config.run.dir,
        iterations,
        side.on_record,
        reward.correct_at,
        decode,
        require_lease,
        has_reserve=config.prompts.reserve > 0,
        training_pool=training_pool,
        trackers=trackers,
        all_responses=config.tracking.all_responses,
    )


def make_ledger(config: Config, parallel: Parallel, require_lease: Callable[[], None] = lambda: None) -> Ledger:
    """Checks on every rank, and writes on the main rank."""
    path = config.run.dir / "ledger.jsonl" if parallel.is_main else None
    limits = noise_limits(config.train, config.model.dtype)
    return Ledger(path, config.rollout.responses_per_prompt, limits, require_lease)


@contextmanager
def _claim(run: RunSection, lease_s: float) -> Iterator[Lease]:
    """Creates a run's directory and holds the lease on it; refuses a directory that another run uses, and one with
    records of another run, unless this run resumes it.

    The process ends at once when another trainer has taken over.
    """
    try:
        run.dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run.dir {str(run.dir)!r} cannot be made: {error.strerror}; name another directory"
        ) from error
    with ExitStack() as closing:
        try:
            closing.enter_context(lock_run(run.dir))
        except RunDirInUse:
            if not may_be_replaced(run.dir):
                raise
        lease = take_lease(run.dir, lease_s)
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
