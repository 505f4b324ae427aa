"""Groups whose rollouts are runs of a program; for `producer`.

A run that fails is repeated, with the turns that were sampled already, up to `rollout.max_attempts` times; one that was
ended because of another one is repeated without being counted. A limit is no failure: the rollout is truncated, keeps
its turns, and gets a reward like any other.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from async_rl.config.sections import SINGLE_TURN, PromptsSection, RolloutSection
from async_rl.data.prompts import Tokenizer, conversation_of
from async_rl.errors import InstanceRefused, PromptFailed, RolloutFailed
from async_rl.pool.inference_pool import InferencePool
from async_rl.rewards import NoReward, Reward
from async_rl.rollout.expected_length import ExpectedLength
from async_rl.rollout.program import Program, ProgramFailed, ProgramInterrupted, ProgramPrompt
from async_rl.rollout.rendering import make_renderer
from async_rl.rollout.rollout_figures import RolloutFigures
from async_rl.rollout.session import NothingSampled, RolloutSession, Sessions
from async_rl.rollout.slots import Slots
from async_rl.rollout.trajectory import Trajectory
from async_rl.rollout.worker_programs import WorkerProgram
from async_rl.seeds import rollout_seed
from async_rl.types import Group, Prompt, WeightVersion

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.5
"""Before the second attempt, and twice as long before each further one: a service that it calls may recover."""


ENVIRONMENT = "environment"
"""The column of a row that names where its rollouts run, such as the URL of a server."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Which rollout it is."""

    iteration: int
    index: int
    number: int
    prompt: Prompt
    version: WeightVersion

    def __str__(self) -> str:
        return (
            f"rollout {self.number} of prompt {self.prompt.prompt_id!r}, index {self.index} of iteration "
            f"{self.iteration}"
        )


def make_program_rollouts(
    rollout: RolloutSection,
    prompts: PromptsSection,
    seed: int,
    model_path: str,
    pool: InferencePool,
    tokenizer: Tokenizer,
    reward: Reward,
    *,
    skip_special_tokens: bool,
    program: Program | None = None,
) -> "ProgramRollouts | None":
    """The rollouts of `rollout.program`, or None for those of a single turn, which the producer generates itself.

    Args:
        program: runs them; None runs a function in worker processes.

    Raises:
        ConfigError: there is no such program, or no renderer for its messages.
    """
    if rollout.program == SINGLE_TURN:
        return None
    program = program or WorkerProgram(rollout)
    renderer = make_renderer(rollout.renderer, tokenizer, model_path)
    sessions = Sessions(pool, tokenizer, renderer, rollout, skip_special_tokens)
    return ProgramRollouts(program, sessions, reward, rollout, prompts, seed)


class ProgramRollouts:
    """Makes groups with a program; all methods run on the producer's event loop."""

    def __init__(
        self,
        program: Program,
        sessions: Sessions,
        reward: Reward,
        rollout: RolloutSection,
        prompts: PromptsSection,
        seed: int,
    ) -> None:
        """`seed` is the run's."""
        self._program = program
        self._sessions = sessions
        self._reward = reward
        self._rollout = rollout
        self._prompts = prompts
        self._seed = seed
        self._slots = Slots(rollout.max_concurrent, rollout.max_concurrent_per_environment)
        self._expected_length = ExpectedLength(rollout.max_response_tokens)
        self.figures = RolloutFigures(rollout.program)

    async def start(self) -> None:
        """See `Program.start`."""
        await self._program.start()

    async def close(self) -> None:
        await self._program.close()

    async def group(self, iteration: int, index: int, prompt: Prompt, version: WeightVersion) -> Group:
        """The scored group of one prompt: `rollout.responses_per_prompt` runs of the program, at the same time.

        Raises:
            RolloutFailed: a run failed too often, or gives no reward where there is no other one.
            RewardError, InstanceError, NoInstanceLeft: see errors.py.
        """
        started_s = time.monotonic()
        places = [
            _Place(iteration, index, number, prompt, version) for number in range(self._rollout.responses_per_prompt)
        ]
        try:
            async with asyncio.TaskGroup() as siblings:
                running = [siblings.create_task(self._roll_out(place)) for place in places]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        trajectories = [task.result()[0] for task in running]
        rewards = await self._rewards(places, trajectories)
        self._expected_length.note(prompt.prompt_id, [t.num_tokens / t.num_turns for t in trajectories])
        return Group(
            iteration=iteration,
            index=index,
            prompt=prompt,
            responses=tuple(response for trajectory in trajectories for response in trajectory.responses),
            rewards=tuple(rewards),
            weight_version=version,
            started_s=started_s,
            finished_s=time.monotonic(),
            attempts=1 + sum(task.result()[1] for task in running),
            rollouts=tuple(trajectory.facts for trajectory in trajectories),
        )

    async def _roll_out(self, place: _Place) -> tuple[Trajectory, int]:
        """A finished rollout, and how often it, or a request of it, had to be repeated."""
        environment = self._environment_of(place.prompt)
        async with self._slots.taken(environment):
            begun_s = time.monotonic()
            num_failures = num_runs = 0
            session: RolloutSession | None = None
            while True:
                num_runs += 1
                session = self._open(place, num_runs, session)
                try:
                    trajectory = await self._run(place, session)
                except ProgramInterrupted:
                    continue
                except (ProgramFailed, NothingSampled) as error:
                    num_failures += 1
                    self._note_failure(place, num_failures, error)
                    await asyncio.sleep(RETRY_PAUSE_S * 2 ** (num_failures - 1))
                    continue
                num_repeats = num_runs - 1 + trajectory.num_faults
                seconds = time.monotonic() - begun_s
                self.figures.note(environment, place.prompt.prompt_id, trajectory, seconds, num_runs - 1)
                return trajectory, num_repeats

    async def _run(self, place: _Place, session: RolloutSession) -> Trajectory:
        prompt = place.prompt
        seed = rollout_seed(self._seed, place.iteration, place.index, place.number)
        shown = ProgramPrompt(
            prompt_id=prompt.prompt_id,
            token_ids=prompt.token_ids,
            row=prompt.row,
            messages=conversation_of(prompt.row, self._prompts),
            seed=seed,
        )
        try:
            result = await self._program.run(shown, session)
            session.close()
            turnstile = self._sessions.turnstile
            async with turnstile.entered():
                return await turnstile.run(
                    lambda: session.finish(result.reward, result.turn_rewards), session.num_recorded
                )
        except InstanceRefused as error:
            error.add_note(f"asked for {place}")
            raise
        except PromptFailed as error:
            raise PromptFailed(
                f"{place}: {error}\nthe instances stay in service: take the prompt out of the data, or repair what it "
                "meets there"
            ) from error
        finally:
            session.close()

    def _environment_of(self, prompt: Prompt) -> str:
        """The one that the row names; those of all other rows are one."""
        name = prompt.row.get(ENVIRONMENT)
        return name if isinstance(name, str) else self._rollout.program

    def _open(self, place: _Place, number: int, earlier: RolloutSession | None) -> RolloutSession:
        return self._sessions.open(
            place.prompt,
            place.version,
            rollout_seed(self._seed, place.iteration, place.index, place.number),
            f"{place.version}-{place.index}-{place.number}-{number}",
            self._expected_length.of(place.prompt.prompt_id),
            earlier,
        )

    def _note_failure(self, place: _Place, num_failures: int, error: Exception) -> None:
        """
        Raises:
            RolloutFailed: it was the last attempt.
        """
        reason = str(error) if isinstance(error, ProgramFailed) else f": {error}"
        attempt = f"attempt {num_failures} of {self._rollout.max_attempts}"
        what = f"rollout.program {self._rollout.program!r}, {place}, {attempt}{reason}"
        if num_failures >= self._rollout.max_attempts:
            raise RolloutFailed(what) from error
        log.warning("%s", what)

    async def _rewards(self, places: Sequence[_Place], trajectories: Sequence[Trajectory]) -> list[float]:
        """Each rollout's own reward, else that of `[reward]`, else that of truncated rollouts."""
        if all(trajectory.reward is not None for trajectory in trajectories):
            scores: Sequence[float | None] = [None] * len(trajectories)
        elif not isinstance(self._reward, NoReward):
            scores = await self._reward.score(places[0].prompt, [trajectory.last for trajectory in trajectories])
        else:
            scores = [
                self._rollout.truncated_reward if trajectory.status == "truncated" else None
                for trajectory in trajectories
            ]
        rewards = []
        for place, trajectory, score in zip(places, trajectories, scores, strict=True):
            reward = score if trajectory.reward is None else trajectory.reward
            if reward is None:
                raise RolloutFailed(
                    f"rollout.program {self._rollout.program!r}, {place}: it returned no reward, and no reward.name is "
                    "set: return a number, or set reward.name"
                )
            rewards.append(reward)
        return rewards
