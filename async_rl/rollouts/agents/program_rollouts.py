"""Which `GroupMaker` a run has, for producer and evaluation; and the one whose rollouts are runs of a program.

A run that fails is repeated, with the turns that were sampled already, up to `rollout.options.max_attempts` times; one
that was ended because of another one is repeated without being counted. A limit is no failure: the rollout is
truncated, keeps its turns, and gets a reward like any other.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

from async_rl.config.evaluation_section import EvaluationSet
from async_rl.config.prompts_section import PromptsSection
from async_rl.config.rollout_section import SINGLE_TURN, RolloutSection
from async_rl.config.sections import Config
from async_rl.errors import InstanceRefused, PromptFailed, RolloutFailed
from async_rl.method.seeds import evaluation_rollout_seed, rollout_seed
from async_rl.method.token_arrays import TokenIds
from async_rl.method.types import Group, Prompt, Response, RewardParts, Scores, WeightVersion
from async_rl.rollouts.agents.program import Program, ProgramFailed, ProgramInterrupted, ProgramPrompt
from async_rl.rollouts.agents.rendering import make_renderer
from async_rl.rollouts.agents.rollout_figures import RolloutFigures
from async_rl.rollouts.agents.session import NothingSampled, RolloutSession, Sessions
from async_rl.rollouts.agents.turn_limits import max_letters_of
from async_rl.rollouts.agents.worker_programs import WorkerProgram
from async_rl.rollouts.data.evaluation_prompts import HELD_OUT, prompts_of_set
from async_rl.rollouts.data.prompts import Tokenizer, conversation_of
from async_rl.rollouts.groups.expected_length import ExpectedLength
from async_rl.rollouts.groups.group_maker import GroupMaker, SingleTurns
from async_rl.rollouts.groups.sampling import Truncation
from async_rl.rollouts.groups.trajectory import Trajectory
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.rewards import NoReward, Reward
from async_rl.shared.programs.parts import has_part, load_part
from async_rl.shared.programs.user_command import COMMAND


class Slots:
    """`per_environment` is None for as many as there are in all."""

    def __init__(self, max_concurrent: int, per_environment: int | None) -> None:
        self._slots = asyncio.Semaphore(max_concurrent)
        self._per_environment = min(per_environment or max_concurrent, max_concurrent)
        self._of_environment: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def taken(self, environment: str) -> AsyncIterator[None]:
        """Waits for a slot of this environment, and then for one of all: who waits for a busy one takes no room."""
        own = self._of_environment.get(environment)
        if own is None:
            own = self._of_environment[environment] = asyncio.Semaphore(self._per_environment)
        async with own, self._slots:
            yield


log = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.5
"""Before the second attempt, and twice as long before each further one: a service that it calls may recover."""

MAX_RETRY_PAUSE_S = 30.0
"""Of a rollout with many attempts, which the whole batch waits for."""


ENVIRONMENT = "environment"
"""The column of a row that names where its rollouts run, such as the URL of a server."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Which rollout it is: `name` in messages, `request` in requests to instances, where it is unique in the run.

    `prompts` are the settings by which the prompt's row was rendered.
    """

    name: str
    request: str
    prompt: Prompt
    prompts: PromptsSection
    version: WeightVersion
    seed: int


@dataclass(frozen=True, slots=True)
class _Finished:
    """A finished rollout: its time since it began, and how often it was run again."""

    trajectory: Trajectory
    seconds: float
    num_repeats: int


def make_group_maker(
    config: Config, pool: InferencePool, tokenizer: Tokenizer, reward: Reward, address: str | None = None
) -> GroupMaker:
    """That of `rollout.program`; its owner starts it, and closes it in any case.

    Args:
        address: this host's for agents elsewhere.

    Raises:
        ConfigError: there is no such program, no renderer for its messages, or no gateway for a command.
    """
    rollout, seed = config.rollout, config.run.seed
    if rollout.program == SINGLE_TURN:
        return SingleTurns(pool, reward, tokenizer, rollout, seed, router_replay=config.train.router_replay)
    # A function can do without: it has `policy.generate`.
    if rollout.program.startswith(COMMAND) or has_part("gateway"):
        program: Program = load_part("gateway", "programs").make_served_program(rollout, tokenizer, address)
    else:
        program = WorkerProgram(rollout)
    return make_program_rollouts(
        *(rollout, config.prompts, seed, config.model.path, pool, tokenizer, reward),
        program=program,
        router_replay=config.train.router_replay,
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
    program: Program,
    router_replay: bool = False,
) -> "ProgramGroupMaker":
    """The rollouts that `program` runs; with `router_replay` instances report the experts of each token.

    Raises:
        ConfigError: there is no renderer for its messages.
    """
    ends = pool.model_tokens.end_token_ids if pool.model_tokens is not None else ()
    renderer = make_renderer(rollout.options.renderer, tokenizer, model_path, ends, prompts.template_arguments)
    letters = max_letters_of(tokenizer)
    sessions = Sessions(pool, tokenizer, renderer, rollout, max_letters=letters, router_replay=router_replay)
    return ProgramGroupMaker(program, sessions, reward, rollout, prompts, seed)


def _with_routes_of_each_prompt_once(responses: Iterable[Response]) -> tuple[Response, ...]:
    """A prompt's routes stay with the first response that follows it: the trainer computes it once."""
    found: list[Response] = []
    met: set[TokenIds | None] = set()
    for response in responses:
        is_known = response.prompt_routes is not None and response.prompt_ids in met
        found.append(replace(response, prompt_routes=None) if is_known else response)
        met.add(response.prompt_ids)
    return tuple(found)


def pause_before(attempt: int) -> float:
    """Seconds before the attempt of this number, counted from 0."""
    return min(RETRY_PAUSE_S * 2.0 ** min(attempt - 1, 64), MAX_RETRY_PAUSE_S)


class ProgramGroupMaker:
    """Implements `GroupMaker` with a program."""

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
        self._slots = Slots(rollout.options.max_concurrent, rollout.options.max_concurrent_per_environment)
        self._expected_length = ExpectedLength(rollout.max_response_tokens)
        self._figures = RolloutFigures(rollout.program)

    async def start(self) -> None:
        await self._reward.start()
        await self._program.start()

    async def close(self) -> None:
        await self._program.close()
        await self._reward.close()

    def take_figures(self) -> Mapping[str, Any]:
        return self._figures.pop_figures()

    async def group(self, iteration: int, index: int, prompt: Prompt, version: WeightVersion) -> Group:
        started_s = time.monotonic()
        places = [
            _Place(
                f"rollout {number} of prompt {prompt.prompt_id!r}, index {index} of iteration {iteration}",
                f"{version}-{index}-{number}",
                prompt,
                self._prompts,
                version,
                rollout_seed(self._seed, iteration, index, number),
            )
            for number in range(self._rollout.responses_per_prompt)
        ]
        expected = self._expected_length.of(prompt.prompt_id)
        finished, scores = await self._roll_out_all(places, self._sessions, expected)
        trajectories = [each.trajectory for each in finished]
        for each in finished:
            self._figures.add_rollout(
                self._environment_of(prompt), prompt.prompt_id, each.trajectory, each.seconds, each.num_repeats
            )
        self._expected_length.add_lengths(prompt.prompt_id, [t.num_tokens / t.num_turns for t in trajectories])
        return Group(
            iteration=iteration,
            index=index,
            prompt=prompt,
            responses=_with_routes_of_each_prompt_once(
                response for trajectory in trajectories for response in trajectory.responses
            ),
            rewards=scores.rewards,
            reward_parts=scores.parts,
            reward_metrics=scores.metrics,
            weight_version=version,
            started_s=started_s,
            finished_s=time.monotonic(),
            attempts=1 + sum(each.num_repeats + each.trajectory.num_faults for each in finished),
            rollouts=tuple(trajectory.facts for trajectory in trajectories),
        )

    async def evaluate(
        self, of_set: EvaluationSet, prompt: Prompt, version: WeightVersion
    ) -> tuple[Sequence[Trajectory], Scores]:
        prompts = self._prompts if of_set.source == HELD_OUT else prompts_of_set(of_set, self._prompts)
        places = [
            _Place(
                f"rollout {number} of prompt {prompt.prompt_id!r} of evaluation set {of_set.name!r}",
                f"{version}-evaluation-{of_set.name}-{prompt.prompt_id}-{number}",
                prompt,
                prompts,
                version,
                evaluation_rollout_seed(self._seed, of_set.name, prompt.prompt_id, number),
            )
            for number in range(of_set.num_samples)
        ]
        rollout = self._rollout.model_copy(update={"temperature": of_set.temperature})
        truncation = Truncation(of_set.top_p, of_set.top_k)
        sessions = replace(self._sessions, rollout=rollout, truncation=truncation, router_replay=False)
        finished, scores = await self._roll_out_all(places, sessions, float(self._rollout.max_response_tokens))
        return [each.trajectory for each in finished], scores

    async def _roll_out_all(
        self, places: Sequence[_Place], sessions: Sessions, expected_tokens: float
    ) -> tuple[list[_Finished], Scores]:
        """The rollouts of one prompt, at the same time, and their rewards; `expected_tokens` are those of a turn."""
        try:
            async with asyncio.TaskGroup() as siblings:
                running = [siblings.create_task(self._roll_out(place, sessions, expected_tokens)) for place in places]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finished = [task.result() for task in running]
        return finished, await self._scores(places, [each.trajectory for each in finished])

    async def _roll_out(self, place: _Place, sessions: Sessions, expected_tokens: float) -> _Finished:
        async with self._slots.taken(self._environment_of(place.prompt)):
            begun_s = time.monotonic()
            num_failures = num_runs = 0
            session: RolloutSession | None = None
            while True:
                num_runs += 1
                name = f"{place.request}-{num_runs}"
                session = RolloutSession(
                    sessions, place.prompt, place.version, place.seed, name, expected_tokens, session
                )
                try:
                    trajectory = await self._run(place, session)
                except ProgramInterrupted:
                    continue
                except (ProgramFailed, NothingSampled) as error:
                    num_failures += 1
                    self._note_failure(place, num_failures, error)
                    await asyncio.sleep(pause_before(num_failures))
                    continue
                return _Finished(trajectory, time.monotonic() - begun_s, num_runs - 1)

    async def _run(self, place: _Place, session: RolloutSession) -> Trajectory:
        prompt = place.prompt
        shown = ProgramPrompt(
            prompt_id=prompt.prompt_id,
            token_ids=prompt.token_ids,
            row=prompt.row,
            messages=conversation_of(prompt.row, place.prompts),
            seed=place.seed,
        )
        try:
            result = await self._program.run(shown, session)
            session.close()
            return await self._sessions.text_executor.run(
                lambda: session.finish(result.reward, result.turn_rewards), session.num_recorded
            )
        except InstanceRefused as error:
            error.add_note(f"asked for {place.name}")
            raise
        except PromptFailed as error:
            raise PromptFailed(
                f"{place.name}: {error}\nthe instances stay in service: take the prompt out of the data, or repair "
                "what it meets there"
            ) from error
        finally:
            session.close()

    def _environment_of(self, prompt: Prompt) -> str:
        """The one that the row names; those of all other rows are one."""
        name = prompt.row.get(ENVIRONMENT)
        return name if isinstance(name, str) else self._rollout.program

    def _note_failure(self, place: _Place, num_failures: int, error: Exception) -> None:
        """
        Raises:
            RolloutFailed: it was the last attempt.
        """
        reason = str(error) if isinstance(error, ProgramFailed) else f": {error}"
        attempt = f"attempt {num_failures} of {self._rollout.options.max_attempts}"
        what = f"rollout.program {self._rollout.program!r}, {place.name}, {attempt}{reason}"
        if num_failures >= self._rollout.options.max_attempts:
            raise RolloutFailed(what) from error
        log.warning("%s", what)

    async def _scores(self, places: Sequence[_Place], trajectories: Sequence[Trajectory]) -> Scores:
        """Each rollout's own reward, else that of `[reward]`, else that of truncated rollouts.

        With parts and metrics only where `[reward]` scored all of them.
        """
        parts: RewardParts = ()
        metrics: RewardParts = ()
        if all(trajectory.reward is not None for trajectory in trajectories):
            scores: Sequence[float | None] = [None] * len(trajectories)
        elif not isinstance(self._reward, NoReward):
            last = [replace(trajectory.last, routes=None, prompt_routes=None) for trajectory in trajectories]
            given = await self._reward.score(places[0].prompt, last)
            scores = given.rewards
            if all(trajectory.reward is None for trajectory in trajectories):
                parts, metrics = given.parts, given.metrics
        else:
            scores = [0.0 if trajectory.status == "truncated" else None for trajectory in trajectories]
        rewards = []
        for place, trajectory, score in zip(places, trajectories, scores, strict=True):
            reward = score if trajectory.reward is None else trajectory.reward
            if reward is None:
                raise RolloutFailed(
                    f"rollout.program {self._rollout.program!r}, {place.name}: it returned no reward, and no "
                    "reward.name is set: return a number, or set reward.name"
                )
            rewards.append(reward)
        return Scores(tuple(rewards), parts, metrics)
