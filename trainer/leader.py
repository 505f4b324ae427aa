"""A leader's side of the inference pool: its members, the fleet endpoint, rollouts, evaluation and publishing.

Every leader has its own pool; only the main rank's serves the endpoint, publishes, admits late joiners and evaluates.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from async_rl.config.rollout_section import SINGLE_TURN, RolloutSection
from async_rl.config.sections import Config
from async_rl.data.prompts import Tokenizer
from async_rl.errors import ConfigError
from async_rl.evaluation.evaluator import Evaluator
from async_rl.evaluation.recorder import EvaluationRecorder
from async_rl.evaluation.sampler import Sampler
from async_rl.evaluation.sets import load_sets
from async_rl.event_loop import EventLoopThread
from async_rl.files import append_lines
from async_rl.fleet.dns import DnsMembership
from async_rl.fleet.follower import FleetFollower
from async_rl.fleet.server import FleetServer
from async_rl.gateway.programs import make_program
from async_rl.pool.inference_pool import InferencePool
from async_rl.proof.gap_limits import noise_limits, noise_scale
from async_rl.publish.admission import Admission
from async_rl.publish.canary import Canary
from async_rl.publish.probe import Probe
from async_rl.publish.publisher import Publisher
from async_rl.rewards import Reward
from async_rl.rewards.readable_answers import answer_check
from async_rl.rollout.producer import MAX_IDLE_WORK_S, Producer
from async_rl.rollout.program_rollouts import ProgramRollouts, make_program_rollouts
from async_rl.tracking.records import ROLLOUTS
from async_rl.tracking.trackers.fan_out import Trackers
from async_rl.types import Prompt, WeightVersion
from async_rl.weights.sender import WeightSender, WeightSource
from trainer.parallel import Parallel


class Leader:
    """Built in the order of its methods; `closing` closes what it opens, in reverse order."""

    def __init__(
        self,
        closing: ExitStack,
        config: Config,
        parallel: Parallel,
        token: str | None,
        pool: InferencePool,
        run: str | None = None,
    ) -> None:
        """`run`: the run's uid, on the main rank."""
        self._closing = closing
        self._config = config
        self._parallel = parallel
        self._token = token
        self._run = run
        self._loop = EventLoopThread()
        closing.callback(self._loop.close)
        self._pool = pool
        closing.callback(lambda: self._loop.end(self._pool.close()))
        self._server: FleetServer | None = None
        self._evaluator: Evaluator | None = None

    @property
    def pool(self) -> InferencePool:
        return self._pool

    def open_fleet(self) -> str:
        """Main rank: opens the fleet endpoint and starts the search for instances by DNS; returns the endpoint's URL.

        Raises:
            ConfigError: the address is not available, or `pool.dns` is not valid.
        """
        config = self._config
        self._server = FleetServer(
            self._pool, config.pool, self._token, config.run.dir, config.publish.master_address, self._run
        )
        self._start(self._server)
        if config.pool.dns is not None:
            self._start(DnsMembership(self._pool, config.pool.dns))
        return self._server.url

    def wait_for_instances(self, fleet_url: str, longest: Prompt) -> None:
        """Waits for the instances and compares their model's length with the run's.

        Raises:
            NoInstanceLeft: none became healthy within `pool.timeout_s`.
            ConfigError: the longest prompt and its response do not fit.
        """
        if not self._parallel.is_main:
            self._start(FleetFollower(self._pool, fleet_url, self._parallel.dp_rank, self._token))
        self._loop.run(self._pool.wait_until_ready())
        self._pool.min_model_len = require_len(self._config.rollout, longest, self._pool.max_model_len)

    def programs(self, tokenizer: Tokenizer, reward: Reward) -> ProgramRollouts | None:
        """The rollouts of the run's program, for evaluator and producer, which starts and closes it.

        None for single turns.

        Raises:
            ConfigError: there is no such program, or no renderer for its messages.
        """
        config = self._config
        return make_program_rollouts(
            config.rollout,
            config.prompts,
            config.run.seed,
            config.model.path,
            self._pool,
            tokenizer,
            reward,
            skip_special_tokens=config.reward.skip_special_tokens,
            program=make_program(config.rollout, tokenizer, config.publish.master_address),
        )

    def evaluator(
        self,
        tokenizer: Tokenizer,
        reward: Reward,
        programs: ProgramRollouts | None,
        held_out: Sequence[Prompt],
        require_lease: Callable[[], None] = lambda: None,
        trackers: Trackers | None = None,
    ) -> Evaluator | None:
        """The evaluator of the config's sets, or None without any; `held_out` are the prompts held out of training,
        `require_lease` raises if its results may not be written any more, `trackers` get them too.

        Raises:
            ConfigError: a set cannot be loaded, or its longest prompt does not fit.
        """
        config = self._config
        if not config.evaluation.sets:
            return None
        sets = load_sets(
            config.evaluation, config.prompts, tokenizer, config.run.seed, held_out, answer_check(config.reward)
        )
        recorder = EvaluationRecorder(config.run.dir, require_lease, trackers)
        sampler = Sampler(
            self._pool,
            reward,
            tokenizer,
            config.rollout,
            config.run.seed,
            skip_special_tokens=config.reward.skip_special_tokens,
            programs=programs,
        )
        evaluator = Evaluator(self._pool, sampler, sets, config.evaluation, recorder.write)
        if evaluator.longest is not None:
            require_len(config.rollout, evaluator.longest, self._pool.max_model_len)
        self._evaluator = evaluator
        return evaluator

    def evaluate_trained(self, version: WeightVersion) -> None:
        """Main rank: evaluates the trained weights, which the pool serves as `version`, and waits for that.

        Raises:
            WaitTimedOut: it took longer than `MAX_IDLE_WORK_S`.
        """

        async def evaluate(evaluator: Evaluator) -> None:
            evaluator.note_awaited()
            await evaluator.evaluate(self._config.train.iterations, version)

        if self._evaluator is not None:
            self._loop.run(evaluate(self._evaluator), MAX_IDLE_WORK_S)

    def producer(
        self,
        tokenizer: Tokenizer,
        reward: Reward,
        programs: ProgramRollouts | None,
        evaluator: Evaluator | None,
        watch: Callable[[], None],
        require_lease: Callable[[], None] = lambda: None,
    ) -> Producer:
        """Produces the rollouts of this leader's replica.

        `watch` raises when the run has to end, `require_lease` if its records may not be written any more.
        """
        config = self._config

        def note_rollouts(figures: Mapping[str, Any]) -> None:
            require_lease()
            append_lines(config.run.dir / ROLLOUTS, [json.dumps(figures)])

        producer = Producer(
            self._pool,
            reward,
            self._loop,
            tokenizer,
            config.rollout,
            config.run.seed,
            evaluator,
            skip_special_tokens=config.reward.skip_special_tokens,
            watch=watch,
            programs=programs,
            on_rollouts=note_rollouts if self._parallel.is_main else lambda figures: None,
        )
        self._closing.callback(producer.close)
        return producer

    def publisher(self, run_id: str, probe_prompt: Prompt, source: WeightSource) -> Publisher:
        """Main rank: the publisher of its weights to this pool, which also admits instances between two publishes.

        Raises:
            ConfigError: the snapshot directory cannot be created.
        """
        config = self._config
        admission = probe = canary = None
        if config.publish.canary != "off":
            noise, dtype = noise_limits(config.train, config.model.dtype).noise, config.model.dtype
            canary = Canary(
                config.publish,
                config.rollout,
                probe_prompt.token_ids,
                noise,
                dtype,
                rounding=noise_scale(dtype),
                exact=config.train.exact,
            )
        if config.publish.snapshot_dir is not None:
            admission = Admission(config.publish)
            admission.canary = canary
            self._pool.late_joiners.admit = admission.admit
        if config.publish.probe_tokens:
            probe = Probe(config.publish, config.rollout, probe_prompt.token_ids)
        sender = WeightSender(source, config.publish, run_id, self._parallel.device.BACKEND)
        self._closing.callback(sender.close)
        return Publisher(
            self._pool,
            self._loop,
            config.publish,
            sender,
            wait_s=config.pool.timeout_s,
            admission=admission,
            probe=probe,
            canary=canary,
        )

    def put_in_service(self, version: WeightVersion, urls: Collection[str]) -> None:
        """Other leaders: puts the instances at `urls` in service with the version that the main rank published."""
        self._loop.run(self._pool.end_publish(version, urls))

    def on_record(self, record: Mapping[str, Any]) -> None:
        """Shows the record of an iteration at the fleet endpoint."""
        if self._server is not None:
            self._server.metrics.note(record)

    def _start(self, part: FleetServer | DnsMembership | FleetFollower) -> None:
        self._loop.run(part.start())
        self._closing.callback(lambda: self._loop.end(part.stop()))


def require_len(rollout: RolloutSection, longest: Prompt, max_model_len: int | None) -> int:
    """Checks that every prompt fits into the model of every instance; returns the tokens that an instance has to take.

    Raises:
        ConfigError: some do not: with their longest response, or of a program with a turn.
    """
    if rollout.program != SINGLE_TURN:
        return require_room(rollout, longest, max_model_len)
    require_fit(rollout, longest, max_model_len)
    return len(longest.token_ids) + rollout.max_response_tokens


def require_fit(rollout: RolloutSection, longest: Prompt, max_model_len: int | None) -> None:
    """Checks that every prompt and its longest response fit into the model of every instance.

    Raises:
        ConfigError: some do not fit; names the prompt and the lengths.
    """
    num_tokens = len(longest.token_ids) + rollout.max_response_tokens
    if max_model_len is not None and num_tokens > max_model_len:
        raise ConfigError(
            f"prompt {longest.prompt_id} has {len(longest.token_ids)} tokens; with rollout.max_response_tokens = "
            f"{rollout.max_response_tokens} that is {num_tokens}, but the instances' model takes {max_model_len}: "
            f"lower prompts.max_prompt_tokens to {max(max_model_len - rollout.max_response_tokens, 0)} "
            "or shorten the responses"
        )


def require_room(rollout: RolloutSection, longest: Prompt, max_model_len: int | None) -> int:
    """Checks that a program has room for a turn after every prompt; returns the tokens that a turn may need in all.

    Raises:
        ConfigError: it has none after some; names the prompt and the lengths.
    """
    num_tokens = len(longest.token_ids)
    most = min((length for length in (max_model_len, rollout.max_context_tokens) if length), default=num_tokens + 1)
    if num_tokens >= most:
        raise ConfigError(
            f"prompt {longest.prompt_id} has {num_tokens} tokens, which leaves no room for a turn: with all that is "
            f"before it, it has at most {most} (rollout.max_context_tokens, else the instances' model): lower "
            f"prompts.max_prompt_tokens to {most - 1}, or raise rollout.max_context_tokens"
        )
    return most
