"""How a prompt becomes a scored group: sampled by the pool, scored by the reward; of a program, turn after turn."""

import gc
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from async_rl.config.rollout_section import RolloutSection
from async_rl.data.prompts import Tokenizer
from async_rl.errors import AsyncRLError, InstanceRefused, PromptFailed
from async_rl.pool.inference_pool import InferencePool
from async_rl.rewards import Reward
from async_rl.rollout.expected_length import ExpectedLength
from async_rl.rollout.program_rollouts import ProgramRollouts
from async_rl.rollout.sampling import decoder, single_turn_sampling, with_text
from async_rl.rollout.turnstile import Turnstile
from async_rl.seeds import group_seed
from async_rl.types import Group, Prompt, WeightVersion

log = logging.getLogger(__name__)


class ScoredRollouts:
    """Generates the groups of a run, for all replicas."""

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
    ) -> None:
        """Args:
        skip_special_tokens: for decoding the responses.
        programs: makes the groups; without it each rollout is a single turn, generated here.
        """
        self._pool = pool
        self._reward = reward
        self._rollout = rollout
        self._seed = seed
        self._expected_length = ExpectedLength(rollout.max_response_tokens)
        self._decode = decoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self.programs = programs
        self._turnstile = Turnstile()

    async def start(self) -> None:
        """Starts the processes of the reward and of the rollout program, and waits for them.

        Raises:
            ConfigError: the reward or the program cannot be loaded.
        """
        await self._reward.start()
        if self.programs is not None:
            await self.programs.start()
        # Collections of garbage stop all rollouts: what has been made until now stays, and is not looked at again.
        gc.freeze()

    async def close(self) -> None:
        """Ends these processes, whatever they do."""
        if self.programs is not None:
            await self.programs.close()
        await self._reward.close()

    def note_finished(self, iteration: int, write: Callable[[Mapping[str, Any]], None]) -> None:
        """All rollouts of an iteration have finished: `write` gets the figures of those of programs."""
        if self.programs is None:
            return
        figures = {"iteration": iteration, **self.programs.figures.take()}
        log.info("rollouts: %s", figures)
        try:
            write(figures)
        except AsyncRLError as error:
            # The groups are complete: the figures alone are lost.
            log.error("the figures of the rollouts of iteration %d are not recorded: %s", iteration, error)

    async def roll_out(self, iteration: int, index: int, prompt: Prompt, version: WeightVersion) -> Group:
        """Generates the scored group of one prompt."""
        if self.programs is not None:
            return await self.programs.group(iteration, index, prompt, version)
        started_s = time.monotonic()
        sampling = single_turn_sampling(
            self._rollout,
            prompt,
            num_responses=self._rollout.responses_per_prompt,
            temperature=self._rollout.temperature,
            seed=group_seed(self._seed, iteration, index),
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
        self._expected_length.note(prompt.prompt_id, [len(response.token_ids) for response in sampled])
        num_tokens = sum(len(response.token_ids) for response in sampled)
        responses = await self._turnstile.run(lambda: with_text(sampled, sampling.stop, self._decode), num_tokens)
        scores = await self._reward.score(prompt, responses)
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
