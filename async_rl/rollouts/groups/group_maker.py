"""How a prompt becomes a scored group: `GroupMaker`, and the simplest one, whose rollouts are single turns.

`ProgramGroupMaker` (`program_rollouts.py`) is the other one. Producer and evaluation use the run's, whichever it is.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from async_rl.config.evaluation_section import EvaluationSet
from async_rl.config.rollout_section import RolloutSection
from async_rl.errors import InstanceRefused, PromptFailed
from async_rl.method.seeds import evaluation_seed, group_seed
from async_rl.method.types import Group, Prompt, Response, Scores, WeightVersion
from async_rl.rollouts.data.prompts import Tokenizer
from async_rl.rollouts.groups.expected_length import ExpectedLength
from async_rl.rollouts.groups.sampling import Truncation, decoder, single_turn_sampling, with_text
from async_rl.rollouts.groups.text_executor import TextExecutor
from async_rl.rollouts.groups.trajectory import Trajectory
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.rewards import Reward
from async_rl.shared.protocol.inference import SamplingParams


class GroupMaker(Protocol):
    """Generates and scores the rollouts of prompts; all methods run on the producer's event loop."""

    async def start(self) -> None:
        """Starts the processes of the reward and of the rollout program, and waits for them.

        Raises:
            ConfigError: the reward or the program cannot be loaded.
        """
        ...

    async def close(self) -> None:
        """Ends these processes, whatever they do."""
        ...

    async def group(self, iteration: int, index: int, prompt: Prompt, version: WeightVersion) -> Group:
        """The scored group of one prompt: `rollout.responses_per_prompt` rollouts, at the same time.

        Raises:
            RolloutFailed: a program failed too often, or gives no reward where there is no other one.
            PromptFailed, RewardError, InstanceError, NoInstanceLeft: see errors.py.
        """
        ...

    async def evaluate(
        self, of_set: EvaluationSet, prompt: Prompt, version: WeightVersion
    ) -> tuple[Sequence[Trajectory], Scores]:
        """The rollouts of a prompt of an evaluation set, with their rewards; in no figures of the training.

        Raises:
            As `group`.
        """
        ...

    def take_figures(self) -> Mapping[str, Any]:
        """What is recorded of the rollouts of groups since the last call, beside these; empty if that is nothing."""
        ...


class SingleTurns:
    """Implements `GroupMaker`: each rollout is one response of the pool."""

    def __init__(
        self,
        pool: InferencePool,
        reward: Reward,
        tokenizer: Tokenizer,
        rollout: RolloutSection,
        seed: int,
        *,
        router_replay: bool = False,
    ) -> None:
        """`seed` is the run's. `router_replay`: whether instances report the experts of each token of a group."""
        self._pool = pool
        self._reward = reward
        self._rollout = rollout
        self._seed = seed
        self._router_replay = router_replay
        self._expected_length = ExpectedLength(rollout.max_response_tokens)
        self._decode = decoder(tokenizer)
        self._text_executor = TextExecutor()

    async def start(self) -> None:
        await self._reward.start()

    async def close(self) -> None:
        await self._reward.close()

    async def group(self, iteration: int, index: int, prompt: Prompt, version: WeightVersion) -> Group:
        started_s = time.monotonic()
        sampling = single_turn_sampling(
            self._rollout,
            prompt,
            num_responses=self._rollout.responses_per_prompt,
            temperature=self._rollout.temperature,
            seed=group_seed(self._seed, iteration, index),
            routed_experts=self._router_replay,
        )
        try:
            sampled, attempts = await self._pool.generate_group(
                prompt.token_ids, sampling, f"{version}-{index}", version, self._expected_length.of(prompt.prompt_id)
            )
        except InstanceRefused as error:
            error.add_note(f"asked for prompt {prompt.prompt_id}, index {index} of iteration {iteration}")
            raise
        except PromptFailed as error:
            raise PromptFailed(
                f"prompt {prompt.prompt_id!r}, index {index} of iteration {iteration}: {error}\n"
                "the instances stay in service: take the prompt out of the data, or repair what it meets there"
            ) from error
        self._expected_length.add_lengths(prompt.prompt_id, [len(response.token_ids) for response in sampled])
        responses = await self._with_text(sampled, sampling)
        # A reward runs in another process, and reads no routes.
        scored = [replace(r, routes=None, prompt_routes=None) for r in responses] if self._router_replay else responses
        scores = await self._reward.score(prompt, scored)
        return Group(
            iteration=iteration,
            index=index,
            prompt=prompt,
            responses=responses,
            rewards=scores.rewards,
            reward_parts=scores.parts,
            reward_metrics=scores.metrics,
            weight_version=version,
            started_s=started_s,
            finished_s=time.monotonic(),
            attempts=attempts,
        )

    async def evaluate(
        self, of_set: EvaluationSet, prompt: Prompt, version: WeightVersion
    ) -> tuple[Sequence[Trajectory], Scores]:
        sampling = single_turn_sampling(
            self._rollout,
            prompt,
            num_responses=of_set.num_samples,
            temperature=of_set.temperature,
            seed=evaluation_seed(self._seed, of_set.name, prompt.prompt_id),
            truncation=Truncation(of_set.top_p, of_set.top_k),
        )
        request_id = f"{version}-evaluation-{of_set.name}-{prompt.prompt_id}"
        sampled, _ = await self._pool.generate_group(prompt.token_ids, sampling, request_id, version)
        responses = await self._with_text(sampled, sampling)
        return list(map(Trajectory.single_turn, responses)), await self._reward.score(prompt, responses)

    def take_figures(self) -> Mapping[str, Any]:
        return {}

    async def _with_text(self, sampled: Sequence[Response], sampling: SamplingParams) -> tuple[Response, ...]:
        num_tokens = sum(len(response.token_ids) for response in sampled)
        return await self._text_executor.run(lambda: with_text(sampled, sampling.stop, self._decode), num_tokens)
