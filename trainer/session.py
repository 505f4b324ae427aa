"""Builds the objects of one training rank from a config and runs the loop on them.

Each replica's leader has its own pool client, rewards and producer; only the main rank publishes and writes records.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from async_rl.config import Config, RolloutSection, RunSection
from async_rl.errors import ConfigError
from async_rl.event_loop import EventLoopThread
from async_rl.ledger import Ledger
from async_rl.loop import Rollouts
from async_rl.metrics import Recorder
from async_rl.pool import InferencePool
from async_rl.producer import Producer
from async_rl.prompts import PromptSource
from async_rl.publish import Publisher
from async_rl.records import RECORDS, cut_run_records
from async_rl.rewards import make_reward
from async_rl.types import Prompt
from trainer.checkpoint import Checkpoints
from trainer.checkpoint_files import checkpoints_dir, newest_checkpoint
from trainer.hf_config import find_checkpoint
from trainer.parallel import Parallel
from trainer.progress import Progress
from trainer.replica import NoRollouts, Replica
from trainer.trainer import MegatronTrainer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Session:
    """What `async_rl.loop.train` takes, built and connected."""

    megatron: MegatronTrainer
    replica: Replica
    prompts: PromptSource
    rollouts: Rollouts
    ledger: Ledger
    recorder: Recorder
    progress: Progress


@contextmanager
def open_session(
    config: Config,
    parallel: Parallel,
    token: str | None = None,
    make_pool: Callable[..., InferencePool] = InferencePool,
) -> Iterator[Session]:
    """Loads model and data, waits for the instances, and closes everything on the way out.

    Args:
        token: bearer token of the instances, if they ask for one.
        make_pool: the pool's class; a benchmark may fix response lengths in its own.

    Raises:
        ConfigError: model, data, reward, layout or lengths cannot work; found before any training.
        NoInstanceLeft: no instance became healthy within `pool.timeout_s`.
    """
    config.require_prompts_for(parallel.num_ranks)
    if parallel.is_main:
        _claim(config.run)
    with ExitStack() as closing:
        reward = make_reward(config.reward)
        tokenizer = _load_tokenizer(config)
        prompts = PromptSource.load(config.prompts, tokenizer, config.run.seed)
        megatron = MegatronTrainer(
            parallel, config.trainer, config.model, config.rollout, config.algorithm, config.optimizer, config.train
        )
        checkpoints = Checkpoints(checkpoints_dir(config.run.dir), config.checkpoint.keep, parallel, config)
        closing.callback(checkpoints.close)
        progress = Progress(checkpoints, megatron, config.run, config.train, config.checkpoint)
        rollouts: Rollouts = NoRollouts()
        pool = publisher = run_dir = None
        if parallel.is_leader:
            loop = EventLoopThread()
            closing.callback(loop.close)
            pool = make_pool(config.pool, token)
            closing.callback(lambda: loop.run(pool.close()))
            loop.run(pool.wait_until_ready())
            require_fit(config.rollout, prompts.longest, pool.max_model_len)
            rollouts = Producer(pool, reward, loop, tokenizer, config.rollout, config.run.seed)
            closing.callback(rollouts.close)
        if parallel.is_main:
            publisher = Publisher(pool, loop, config.publish, parallel.device.BACKEND)
            closing.callback(publisher.close)
            run_dir = config.run.dir
            num_cut = cut_run_records(run_dir, progress.first_iteration)
            log.info("starting at iteration %d, %d later records removed", progress.first_iteration, num_cut)
        recorder = Recorder(run_dir, config.train.iterations, progress.first_iteration)
        closing.callback(recorder.close)
        yield Session(
            megatron,
            Replica(megatron, parallel, pool, publisher),
            prompts,
            rollouts,
            Ledger(
                run_dir and run_dir / "ledger.jsonl", config.rollout.responses_per_prompt, config.train.max_logprob_gap
            ),
            recorder,
            progress,
        )


def _claim(run: RunSection) -> None:
    """Makes the directory of a run; refuses one with records of another, unless the run goes on with them."""
    run.dir.mkdir(parents=True, exist_ok=True)
    if run.resume:
        return
    if newest_checkpoint(checkpoints_dir(run.dir)) or any((run.dir / name).exists() for name in RECORDS):
        raise ConfigError(
            f"run.dir {str(run.dir)!r} holds the records of another run: name a new one, remove it, or set "
            "run.resume = true to go on with it"
        )


def _load_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    checkpoint = find_checkpoint(config.model.path)
    try:
        return AutoTokenizer.from_pretrained(checkpoint)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {config.model.path!r} has no tokenizer that loads: {error}") from error


def require_fit(rollout: RolloutSection, longest: Prompt, max_model_len: int | None) -> None:
    """Checks that every prompt and its longest response fit into the model of every instance.

    Raises:
        ConfigError: they do not; names the prompt and the lengths.
    """
    num_tokens = len(longest.token_ids) + rollout.max_response_tokens
    if max_model_len is not None and num_tokens > max_model_len:
        raise ConfigError(
            f"prompt {longest.prompt_id} has {len(longest.token_ids)} tokens; with rollout.max_response_tokens = "
            f"{rollout.max_response_tokens} that is {num_tokens}, but the instances' model takes {max_model_len}: "
            f"lower prompts.max_prompt_tokens to {max(max_model_len - rollout.max_response_tokens, 0)} "
            "or shorten the responses"
        )
