"""Evaluates the weights in training, in idle time of the pool as far as that reaches.

Built by `trainer.session`; implements `IdleWork` of `groups/idle_work.py`: training waits for an evaluation that is
not complete when the batch is.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean

from async_rl.config.evaluation_section import EvaluationSection
from async_rl.errors import InstanceError, NoInstanceLeft, RewardError, RolloutFailed
from async_rl.evaluation.intervals import Interval, mean_interval, share_interval
from async_rl.evaluation.recorder import SetResult, SourceResult
from async_rl.evaluation.sets import LoadedSet, source_of
from async_rl.method.types import (
    CorrectAt,
    Prompt,
    Response,
    RewardParts,
    Scores,
    WeightVersion,
    num_correct,
    reward_part_means,
)
from async_rl.records.pass_at_k import ks_of, pass_at_k
from async_rl.rollouts.groups.group_maker import GroupMaker
from async_rl.rollouts.groups.trajectory import Trajectory
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.rewards import Reward

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """The data kept of a prompt's rollouts: rewards, lengths, and how many a limit truncated."""

    rewards: tuple[float, ...]
    num_tokens: int
    num_truncated: int
    reward_parts: RewardParts = ()

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], scores: Scores) -> "ScoredPrompt":
        return cls(
            rewards=scores.rewards,
            reward_parts=scores.shown,
            num_tokens=sum(trajectory.num_tokens for trajectory in trajectories),
            num_truncated=sum(trajectory.status == "truncated" for trajectory in trajectories),
        )


def figures_of(scored: Sequence[ScoredPrompt], correct_at: CorrectAt) -> dict[str, float]:
    """Means over the prompts of a complete set, each with the same number of responses.

    avg@k (the share of correct samples, k of each prompt) and pass@k over the prompts for which it is defined when a
    response is correct.
    """
    num_responses = len(scored[0].rewards) * len(scored)
    return {name: fmean(values) for name, (values, _) in _shares(scored, correct_at).items()} | {
        "reward_mean": fmean(reward for prompt in scored for reward in prompt.rewards),
        **reward_part_means(prompt.reward_parts for prompt in scored),
        "response_tokens_mean": sum(prompt.num_tokens for prompt in scored) / num_responses,
        "truncated_share": sum(prompt.num_truncated for prompt in scored) / num_responses,
    }


def intervals_of(scored: Sequence[ScoredPrompt], correct_at: CorrectAt) -> dict[str, Interval]:
    """The confidence interval of each of these figures that has one: avg@k, pass@k, the mean reward."""
    intervals = {name: share_interval(*share) for name, share in _shares(scored, correct_at).items()}
    rewards = mean_interval([fmean(prompt.rewards) for prompt in scored])
    return intervals | ({} if rewards is None else {"reward_mean": rewards})


def _shares(scored: Sequence[ScoredPrompt], correct_at: CorrectAt) -> dict[str, tuple[list[float], int]]:
    """figure -> its value for each prompt that has one, and how many independent samples these are at most."""
    size = len(scored[0].rewards)
    counts = [num_correct(correct_at, prompt.rewards, prompt.reward_parts) for prompt in scored]
    judged = [count for count in counts if count is not None]
    if not judged:
        return {}
    shares = {f"avg@{size}": ([count / size for count in judged], size * len(judged))}
    return shares | {
        f"pass@{k}": ([pass_at_k(size, count, k) for count in judged], size // k * len(judged)) for k in ks_of(size)
    }


RESPONSES_PER_INSTANCE = 64
"""Concurrent responses per instance: enough to keep it busy, few enough that it ends soon."""

IDLE_POLL_S = 0.05

OnScored = Callable[[LoadedSet, Prompt, Sequence[Response], Scores], None]
"""Called with each finished prompt: its set, its responses, of programs their last turns, and their rewards."""

MAX_SOURCES = 32
"""Of one set, whose figures are recorded one by one: a column with more values is hardly one of sources."""


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    """A prompt of a set; compared by identity."""

    loaded: LoadedSet
    prompt: Prompt


@dataclass(slots=True)
class _Evaluation:
    """One running evaluation."""

    iteration: int
    version: WeightVersion
    waiting: deque[_Item]
    started_s: float
    started_unix_s: float
    scored: dict[_Item, ScoredPrompt] = field(default_factory=dict)
    failed: set[_Item] = field(default_factory=set)
    delay_s: float = 0.0
    """How long training has waited for it."""

    def is_whole(self, loaded: LoadedSet) -> bool:
        """Whether every prompt of a set was scored."""
        return sum(item.loaded is loaded for item in self.scored) == len(loaded.prompts)

    def result(self, loaded: LoadedSet, correct_at: CorrectAt) -> SetResult:
        """The result on a set; figures only if it is complete, since short responses finish first."""
        items = [item for item in self.scored if item.loaded is loaded]
        scored = [self.scored[item] for item in items]
        is_whole = self.is_whole(loaded)
        return SetResult(
            iteration=self.iteration,
            weight_version=self.version,
            set=loaded.name,
            num_prompts=len(scored),
            total_prompts=len(loaded.prompts),
            num_failed=sum(item.loaded is loaded for item in self.failed),
            num_samples=loaded.config.num_samples,
            temperature=loaded.config.temperature,
            seconds=time.monotonic() - self.started_s,
            delay_s=self.delay_s,
            figures=figures_of(scored, correct_at) if is_whole else {},
            started_unix_s=self.started_unix_s,
            top_p=loaded.config.top_p,
            top_k=loaded.config.top_k,
            intervals=intervals_of(scored, correct_at) if is_whole else {},
            sources=self._sources(items, correct_at) if is_whole else {},
        )

    def _sources(self, items: Sequence[_Item], correct_at: CorrectAt) -> dict[str, SourceResult]:
        """The figures of each source of the prompts, by name; empty where there is one, or too many for a record."""
        scored: dict[str, list[ScoredPrompt]] = {}
        for item in items:
            scored.setdefault(source_of(item.prompt), []).append(self.scored[item])
        if not 1 < len(scored) <= MAX_SOURCES:
            return {}
        return {
            name: SourceResult(len(own), figures_of(own, correct_at), intervals_of(own, correct_at))
            for name, own in sorted(scored.items())
        }


class Evaluator:
    """The evaluations of a run: one every `evaluation.every` iterations, and `evaluate`, each of one weight version.

    A set that was not evaluated completely has no figures, and is the first of the next evaluation.
    """

    def __init__(
        self,
        pool: InferencePool,
        maker: GroupMaker,
        reward: Reward,
        sets: Sequence[LoadedSet],
        config: EvaluationSection,
        report: Callable[[Sequence[SetResult]], None],
        on_scored: OnScored = lambda loaded, prompt, responses, scores: None,
    ) -> None:
        """`maker` scores with `reward`; its owner starts and closes it. `report` gets the results of each evaluation,
        one per set."""
        self._pool = pool
        self._maker = maker
        self._reward = reward
        self._sets = tuple(sets)
        self._every = config.every
        self.first_failure = ""
        """Why the first prompt failed that did, of all evaluations."""
        self._report = report
        self._on_scored = on_scored
        self._order = list(sets)
        self._stopping = asyncio.Event()
        self._awaited_since_s: float | None = None
        self._running = asyncio.Lock()
        self._workers: set[asyncio.Task[None]] = set()

    @property
    def longest(self) -> Prompt | None:
        """The prompt with the most tokens, of all sets."""
        prompts = (prompt for loaded in self._sets for prompt in loaded.prompts)
        return max(prompts, key=lambda prompt: len(prompt.token_ids), default=None)

    async def run(self, iteration: int, version: WeightVersion) -> None:
        """Evaluates `version`, if an evaluation is due, as soon as no rollout is running."""
        if iteration % self._every == 0:
            await self.evaluate(iteration, version)

    async def evaluate(self, iteration: int, version: WeightVersion) -> None:
        """Evaluates `version`, the weights after `iteration` iterations, and reports the results."""
        if not self._order:
            return
        async with self._running:
            self._stopping.clear()
            items = deque(_Item(loaded, prompt) for loaded in self._order for prompt in loaded.prompts)
            evaluation = _Evaluation(iteration, version, items, time.monotonic(), time.time())
            try:
                await self._wait_until_idle()
                await self._work(evaluation)
            finally:
                if self._awaited_since_s is not None:
                    evaluation.delay_s = time.monotonic() - self._awaited_since_s
                self._order.sort(key=evaluation.is_whole)  # stable: incomplete sets come first, in their previous order
                correct_at = self._reward.correct_at
                self._report([evaluation.result(loaded, correct_at) for loaded in self._sets])

    def note_awaited(self) -> None:
        """Training waits from now on: the batch is proven, so that no rollout is left to wait for."""
        self._awaited_since_s = time.monotonic()

    async def stop(self) -> None:
        """Cancels what is left; when this returns, none of its requests is running."""
        self._stopping.set()
        for worker in self._workers:
            worker.cancel()
        async with self._running:
            self._awaited_since_s = None

    async def _wait_until_idle(self) -> None:
        while not (self._pool.is_idle or self._awaited_since_s is not None or self._stopping.is_set()):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), IDLE_POLL_S)

    async def _work(self, evaluation: _Evaluation) -> None:
        """Runs a bounded number of prompts concurrently until all have finished, or until it is stopped."""
        num_ready = sum(member.serves(evaluation.version) for member in self._pool.members)
        num_samples = max(loaded.config.num_samples for loaded in self._sets)
        num_workers = max(1, num_ready * RESPONSES_PER_INSTANCE // num_samples)
        self._workers = {asyncio.create_task(self._score_next(evaluation)) for _ in range(num_workers)}
        try:
            await asyncio.wait(self._workers)
            for worker in self._workers:
                if not worker.cancelled():
                    worker.result()
        finally:
            for worker in self._workers:
                worker.cancel()
            await asyncio.gather(*self._workers, return_exceptions=True)
            self._workers = set()

    async def _score_next(self, evaluation: _Evaluation) -> None:
        """Scores one prompt after the other; one that fails is logged, and its set gets no figures."""
        while evaluation.waiting and not self._stopping.is_set():
            item = evaluation.waiting.popleft()
            try:
                scored = await self._score(item, evaluation.version)
            except (InstanceError, RewardError, RolloutFailed) as error:
                log.error("evaluation set %s, prompt %s: %s", item.loaded.name, item.prompt.prompt_id, error)
                self.first_failure = self.first_failure or str(error)
                evaluation.failed.add(item)
            except NoInstanceLeft as error:
                log.error("the evaluation ends early: %s", error)
                self.first_failure = self.first_failure or str(error)
                evaluation.failed.add(item)
                self._stopping.set()
            else:
                evaluation.scored[item] = scored

    async def _score(self, item: _Item, version: WeightVersion) -> ScoredPrompt:
        trajectories, scores = await self._maker.evaluate(item.loaded.config, item.prompt, version)
        self._on_scored(item.loaded, item.prompt, [trajectory.last for trajectory in trajectories], scores)
        return ScoredPrompt.of(trajectories, scores)
