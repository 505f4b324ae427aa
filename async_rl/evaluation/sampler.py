"""Samples and scores one prompt of an evaluation set; for `evaluator`."""

from collections.abc import Callable, Sequence

from async_rl.config.evaluation_section import EvaluationSet
from async_rl.config.rollout_section import RolloutSection
from async_rl.data.prompts import Tokenizer
from async_rl.evaluation.figures import ScoredPrompt
from async_rl.evaluation.sets import LoadedSet
from async_rl.pool.inference_pool import InferencePool
from async_rl.rewards import Reward
from async_rl.rollout.program_rollouts import ProgramRollouts
from async_rl.rollout.sampling import Truncation, decoder, single_turn_sampling, with_text
from async_rl.seeds import evaluation_seed
from async_rl.types import CorrectAt, Prompt, Response, Scores, WeightVersion

OnScored = Callable[[LoadedSet, Prompt, Sequence[Response], Scores], None]
"""Called with each finished prompt: its set, its responses, of programs their last turns, and their rewards."""


class Sampler:
    """Samples at the instances of `pool` and scores with `reward`, which its owner starts and closes.

    `programs` runs the rollouts of the run's program, which its owner starts and closes, too; None generates single
    turns.
    """

    def __init__(
        self,
        pool: InferencePool,
        reward: Reward,
        tokenizer: Tokenizer,
        rollout: RolloutSection,
        seed: int,
        *,
        skip_special_tokens: bool = True,
        programs: ProgramRollouts | None = None,
        on_scored: OnScored | None = None,
    ) -> None:
        self._pool = pool
        self._reward = reward
        self._rollout = rollout
        self._seed = seed
        self._decode = decoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._programs = programs
        self._on_scored = on_scored

    @property
    def correct_at(self) -> CorrectAt:
        """See `Reward.correct_at`."""
        return self._reward.correct_at

    async def score(self, loaded: LoadedSet, prompt: Prompt, version: WeightVersion) -> ScoredPrompt:
        """Samples the set's `num_samples` rollouts with the weights `version`.

        Raises:
            InstanceError, NoInstanceLeft, RewardError, RolloutFailed: see errors.py.
        """
        if self._programs is None:
            responses = await self._sample(loaded, prompt, version)
            scores = await self._reward.score(prompt, responses)
            scored = ScoredPrompt.of(responses, scores)
        else:
            trajectories, scores = await self._programs.evaluate(
                loaded.config, prompt, version, _truncation(loaded.config)
            )
            responses = [trajectory.last for trajectory in trajectories]
            scored = ScoredPrompt.of_trajectories(trajectories, scores)
        if self._on_scored is not None:
            self._on_scored(loaded, prompt, responses, scores)
        return scored

    async def _sample(self, loaded: LoadedSet, prompt: Prompt, version: WeightVersion) -> Sequence[Response]:
        """Single turns."""
        sampling = single_turn_sampling(
            self._rollout,
            prompt,
            num_responses=loaded.config.num_samples,
            temperature=loaded.config.temperature,
            seed=evaluation_seed(self._seed, loaded.name, prompt.prompt_id),
            truncation=_truncation(loaded.config),
        )
        request_id = f"{version}-evaluation-{loaded.name}-{prompt.prompt_id}"
        sampled, _ = await self._pool.generate_group(prompt.token_ids, sampling, request_id, version)
        return with_text(sampled, sampling.stop, self._decode)


def _truncation(config: EvaluationSet) -> Truncation:
    return Truncation(config.top_p, config.top_k)
