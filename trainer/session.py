"""Builds the objects of one training rank from a config and runs the loop on them.

Every data-parallel leader has its own pool client, rewards and producer; only the main rank publishes and writes files.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from async_rl.config import Config, RolloutSection
from async_rl.errors import ConfigError
from async_rl.event_loop import EventLoopThread
from async_rl.ledger import Ledger
from async_rl.metrics import Recorder
from async_rl.pool import InferencePool
from async_rl.producer import Producer
from async_rl.prompts import PromptSource
from async_rl.publish import Publisher
from async_rl.rewards import make_reward
from async_rl.types import Group, GroupProof, Prompt, Publication, StepStats
from trainer.hf_config import find_checkpoint
from trainer.parallel import Parallel
from trainer.trainer import MegatronTrainer


class Replica:
    """The loop's `Trainer`: the Megatron trainer, and publishing from it to the inference pool."""

    def __init__(
        self,
        megatron: MegatronTrainer,
        parallel: Parallel,
        pool: InferencePool,
        publisher: Publisher | None,
    ) -> None:
        """`publisher` is given on the main rank only."""
        self._megatron = megatron
        self._parallel = parallel
        self._pool = pool
        self._publisher = publisher
        # Unique per run, so that an instance left over from another run cannot pass for this one's.
        self._run_id: str = parallel.broadcast_json(secrets.token_hex(4))
        self._num_publishes = 0

    @property
    def replica(self) -> int:
        return self._parallel.replica

    @property
    def num_replicas(self) -> int:
        return self._parallel.num_replicas

    def publish_weights(self) -> Publication:
        """Moves the weights to the pool and tells every rank which instances serve them; waits for the main rank.

        Raises:
            PublishError: no instance took the weights.
        """
        version = f"{self._run_id}-{self._num_publishes}"
        self._num_publishes += 1
        publication: Publication | None = None
        if self._publisher is not None:
            specs, _ = self._megatron.weights()
            publication = self._publisher.publish(version, specs, lambda: self._megatron.weights()[1])
        answer = self._parallel.broadcast_json(publication and asdict(publication))
        publication = Publication(**answer | {"instances": tuple(answer["instances"])})
        if self._publisher is None:
            self._pool.set_version(version, publication.instances)
        return publication

    def accumulate(self, group: Group) -> GroupProof:
        return self._megatron.accumulate(group)

    def gather(self, rows: Sequence[GroupProof]) -> list[GroupProof]:
        return self._megatron.gather(rows)

    def optimizer_step(self) -> StepStats:
        return self._megatron.optimizer_step()


@dataclass(frozen=True, slots=True)
class Session:
    """What `async_rl.loop.train` takes, built and connected."""

    megatron: MegatronTrainer
    replica: Replica
    prompts: PromptSource
    producer: Producer
    ledger: Ledger
    recorder: Recorder


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
        ConfigError: model, data, reward or lengths cannot work; found before any training.
        NoInstanceLeft: no instance became healthy within `pool.timeout_s`.
    """
    with ExitStack() as closing:
        tokenizer = _load_tokenizer(config)
        prompts = PromptSource.load(config.prompts, tokenizer, config.run.seed)
        reward = make_reward(config.reward)
        megatron = MegatronTrainer(
            parallel,
            config.trainer,
            config.model,
            config.rollout,
            config.algorithm,
            config.optimizer,
            config.train.iterations,
        )
        loop = EventLoopThread()
        closing.callback(loop.close)
        pool = make_pool(config.pool, token)
        closing.callback(lambda: loop.run(pool.close()))
        loop.run(pool.wait_until_ready())
        require_fit(config.rollout, prompts.longest, pool.max_model_len)
        publisher = Publisher(pool, loop, config.publish, parallel.device.BACKEND) if parallel.is_main else None
        if publisher is not None:
            closing.callback(publisher.close)
        run_dir = _claim(config.run.dir) if parallel.is_main else None
        recorder = Recorder(run_dir, config.train.iterations)
        closing.callback(recorder.close)
        producer = Producer(pool, reward, loop, tokenizer, config.rollout, config.run.seed)
        closing.callback(producer.close)
        yield Session(
            megatron,
            Replica(megatron, parallel, pool, publisher),
            prompts,
            producer,
            Ledger(
                run_dir and run_dir / "ledger.jsonl", config.rollout.responses_per_prompt, config.train.max_logprob_gap
            ),
            recorder,
        )


def _claim(run_dir: Path) -> Path:
    """Makes the directory of a run, and refuses one with the records of another."""
    run_dir.mkdir(parents=True, exist_ok=True)
    if (run_dir / "metrics.jsonl").exists() or (run_dir / "ledger.jsonl").exists():
        raise ConfigError(f"run.dir {str(run_dir)!r} holds the records of another run: name a new one, or remove it")
    return run_dir


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
