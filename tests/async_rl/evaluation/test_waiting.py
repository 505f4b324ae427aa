"""How long training waits for an evaluation, on a clock that jumps: no instance, no process."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from async_rl.config.evaluation_section import EvaluationSection, EvaluationSet
from async_rl.evaluation.evaluator import Evaluator
from async_rl.evaluation.recorder import SetResult
from async_rl.evaluation.sets import LoadedSet
from async_rl.method.types import Prompt, Scores
from async_rl.rollouts.groups.trajectory import Trajectory
from tests.support import virtual_time
from tests.support.groups import make_response

PROMPT_S = 10.0
AT_ONCE = 64
"""`RESPONSES_PER_INSTANCE`, with one sample a prompt and one instance."""


class _Member:
    def serves(self, version: str) -> bool:
        return True


@dataclass
class _Pool:
    is_idle: bool = True
    members: Sequence[_Member] = (_Member(),)


@dataclass
class _Maker:
    """And the reward, of which an evaluator asks what is correct."""

    correct_at: float | None = 1.0
    num_begun: int = 0

    async def evaluate(self, of_set: EvaluationSet, prompt: Prompt, version: str) -> tuple[list[Trajectory], Scores]:
        self.num_begun += 1
        await asyncio.sleep(PROMPT_S)
        return [Trajectory.single_turn(make_response())], Scores((1.0,))


@dataclass
class Stage:
    num_prompts: int
    every: int = 1
    pool: _Pool = field(default_factory=_Pool)
    maker: _Maker = field(default_factory=_Maker)
    results: list[SetResult] = field(default_factory=list)

    def evaluator(self) -> Evaluator:
        prompts = tuple(Prompt(str(i), (3, i), {}) for i in range(self.num_prompts))
        loaded = LoadedSet(EvaluationSet(name="words", source="x.jsonl"), prompts)
        section = EvaluationSection(every=self.every)
        pool, maker = cast(Any, self.pool), cast(Any, self.maker)
        return Evaluator(pool, maker, maker, [loaded], section, self.results.extend)


def test_an_evaluation_that_training_waits_for_begins_more_prompts_and_tells_what_it_cost() -> None:
    stage = Stage(3 * AT_ONCE)

    async def scenario() -> None:
        evaluator = stage.evaluator()
        running = asyncio.create_task(evaluator.run(0, "v1"))
        await asyncio.sleep(PROMPT_S / 2)
        assert stage.maker.num_begun == AT_ONCE
        evaluator.note_awaited()
        await running
        await evaluator.stop()
        await evaluator.run(1, "v2")

    virtual_time.run(scenario())
    (result, unawaited) = stage.results
    assert result.is_complete and result.figures["pass@1"] == 1.0
    assert result.delay_s == pytest.approx(2.5 * PROMPT_S) and result.seconds == pytest.approx(3 * PROMPT_S)
    assert unawaited.is_complete and unawaited.delay_s == 0.0, "the wait for the one before is no cost of the next"


def test_a_pool_that_stays_busy_is_left_alone_until_training_waits() -> None:
    stage = Stage(2, pool=_Pool(is_idle=False))

    async def scenario() -> None:
        evaluator = stage.evaluator()
        running = asyncio.create_task(evaluator.run(0, "v1"))
        await asyncio.sleep(30)
        assert stage.maker.num_begun == 0
        evaluator.note_awaited()
        await running

    virtual_time.run(scenario())
    assert stage.results[0].is_complete


def test_what_is_left_is_cancelled_and_said_to_be_without_figures() -> None:
    stage = Stage(2 * AT_ONCE)

    async def scenario() -> None:
        evaluator = stage.evaluator()
        running = asyncio.create_task(evaluator.run(0, "v1"))
        await asyncio.sleep(1)
        evaluator.note_awaited()
        await asyncio.wait({running}, timeout=PROMPT_S)
        await evaluator.stop()
        await running

    virtual_time.run(scenario())
    (result,) = stage.results
    assert (result.num_prompts, result.total_prompts, result.figures) == (AT_ONCE, 2 * AT_ONCE, {})
    assert result.delay_s == pytest.approx(PROMPT_S)


def test_the_weights_after_the_last_step_are_evaluated_whatever_the_iteration() -> None:
    stage = Stage(1, every=10)

    async def scenario() -> None:
        evaluator = stage.evaluator()
        await evaluator.run(7, "v7")
        assert stage.results == []
        evaluator.note_awaited()
        await evaluator.evaluate(8, "v8")

    virtual_time.run(scenario())
    assert [(each.iteration, each.weight_version) for each in stage.results] == [(8, "v8")]
