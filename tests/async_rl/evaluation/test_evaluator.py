import concurrent.futures
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from async_rl.config.evaluation_section import EvaluationSection, EvaluationSet
from async_rl.config.pool_section import PoolSection
from async_rl.config.reward_section import RewardSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.errors import RolloutFailed, RunStopped
from async_rl.evaluation.evaluator import Evaluator
from async_rl.evaluation.recorder import SetResult
from async_rl.evaluation.sets import LoadedSet
from async_rl.method.seeds import evaluation_seed, group_seed
from async_rl.method.types import Batch, Prompt, Scores
from async_rl.rollouts.groups.group_maker import SingleTurns
from async_rl.rollouts.groups.trajectory import Trajectory
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.rewards import Reward, make_reward
from async_rl.shared.event_loop import EventLoopThread
from benchmarks.common.local_producer import LocalProducer as Producer
from tests.support.groups import make_response
from tests.support.waiting import wait_for

pytestmark = pytest.mark.distributed

REWARD = """
async def score(prompt, responses, row):
    if row.get("broken"):
        raise KeyError("broken row")
    return [row["reward"]] * len(responses)


score.correct_at = 1.0
"""
SLOW = 59
"""A prompt with this token gets no answer."""


class Stage:
    """A pool in service with version v1, and an evaluator on it that writes its results to `results`."""

    def __init__(
        self,
        loop: EventLoopThread,
        pool: InferencePool,
        maker: SingleTurns,
        reward: Reward,
    ) -> None:
        self.loop = loop
        self.pool = pool
        self._maker = maker
        self._reward = reward
        self.results: list[list[SetResult]] = []
        self.scored: list[str] = []

    def evaluator(self, *sets: LoadedSet, **section: Any) -> Evaluator:
        def report(results: Sequence[SetResult]) -> None:
            self.results.append(list(results))

        config = EvaluationSection(**{"every": 1, **section})
        return Evaluator(
            *(self.pool, self._maker, self._reward, sets, config, report),
            on_scored=lambda loaded, *_: self.scored.append(loaded.name),
        )

    def producer(self, evaluator: Evaluator) -> Producer:
        """Makes rollouts in the same pool, and gives it to the evaluator when they are done."""
        return Producer(self._maker, self.loop, evaluator)

    def begin(self, evaluator: Evaluator, iteration: int = 0) -> concurrent.futures.Future[None]:
        return self.loop.submit(evaluator.run(iteration, "v1"))

    def run(self, evaluator: Evaluator, iteration: int = 0) -> list[SetResult]:
        """A whole evaluation; its results, one per set."""
        before = len(self.results)
        self.loop.run(evaluator.run(iteration, "v1"), timeout_s=120)
        return self.results[-1] if len(self.results) > before else []


@pytest.fixture
def make_stage(
    loop: EventLoopThread, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> Iterator[Callable[..., Stage]]:
    (tmp_path / "reward.py").write_text(REWARD)
    pools: list[InferencePool] = []
    reward = make_reward(RewardSection(name=f"python:{tmp_path / 'reward.py'}:score"))
    loop.run(reward.start())

    def make(*instances: Any) -> Stage:
        urls = tuple(instance.url for instance in instances)
        pool = InferencePool(PoolSection(instances=urls, timeout_s=5.0))
        pools.append(pool)
        loop.run(pool.wait_until_ready())
        loop.run(pool.begin_publish())
        loop.run(pool.end_publish("v1", urls))
        rollout = RolloutSection(max_response_tokens=8, stop=(7,))
        return Stage(loop, pool, SingleTurns(pool, reward, tokenizer, rollout, 1), reward)

    yield make
    loop.run(reward.close())
    for pool in pools:
        loop.run(pool.close())


def a_set(name: str, size: int, *, slow: Sequence[int] = (), num_samples: int = 2, **settings: Any) -> LoadedSet:
    """A set whose prompt i has the token 10 + i, and the reward 1 where i is even."""
    prompts = (
        Prompt(str(i), (3, 10 + i, *((SLOW,) if i in slow else ())), {"reward": float(i % 2 == 0), **settings})
        for i in range(size)
    )
    return LoadedSet(EvaluationSet(name=name, source="x.jsonl", num_samples=num_samples), tuple(prompts))


def places(instance: Any) -> list[int]:
    """Which prompts an instance was asked for, in order."""
    return [request["token_ids"][1] - 10 for request in instance.seen()["requests"]]


def test_every_prompt_of_every_set_is_sampled_and_scored_with_one_version(instances, make_stage) -> None:
    stage = make_stage(*instances({}, {}))
    words, sums = stage.run(stage.evaluator(a_set("words", 6), a_set("sums", 3, num_samples=4)), iteration=7)
    assert (words.set, words.num_prompts, words.total_prompts, words.figures["pass@1"]) == ("words", 6, 6, 0.5)
    assert (sums.set, sums.num_samples, sums.figures["pass@4"]) == ("sums", 4, pytest.approx(2 / 3))
    assert {(each.iteration, each.weight_version, each.num_failed) for each in (words, sums)} == {(7, "v1", 0)}
    assert sorted(stage.scored) == ["sums"] * 3 + ["words"] * 6


def test_an_evaluation_is_due_every_so_many_iterations(instances, make_stage) -> None:
    stage = make_stage(*instances({}))
    evaluator = stage.evaluator(a_set("words", 1), every=3)
    assert [iteration for iteration in range(8) if stage.run(evaluator, iteration)] == [0, 3, 6]


def test_each_evaluation_draws_the_same_samples_and_no_rollouts_seed(instances, make_stage) -> None:
    (instance,) = instances({})
    stage = make_stage(instance)
    evaluator = stage.evaluator(a_set("words", 3))
    first, second = stage.run(evaluator), stage.run(evaluator, 1)
    assert first[0].figures == second[0].figures
    requests = instance.seen()["requests"]
    seeds = [sorted(r["sampling_params"]["seed"] for r in half) for half in (requests[:3], requests[3:])]
    assert seeds[0] == seeds[1] == sorted(evaluation_seed(1, "words", str(i)) for i in range(3))
    assert evaluation_seed(1, "words", "0") != evaluation_seed(1, "sums", "0") != evaluation_seed(2, "sums", "0")
    assert not {group_seed(1, t, i) for t in range(9) for i in range(9)} & set(seeds[0])


def test_requests_ask_for_the_sets_temperature_and_the_rollouts_lengths(instances, make_stage) -> None:
    (instance,) = instances({})
    stage = make_stage(instance)
    greedy = EvaluationSet(name="words", source="x.jsonl", temperature=0.0)
    stage.run(stage.evaluator(LoadedSet(greedy, a_set("words", 1).prompts)))
    sampling = instance.seen()["requests"][0]["sampling_params"]
    assert (sampling["temperature"], sampling["max_tokens"], sampling["stop_token_ids"]) == (0.0, 8, [7])


def test_a_set_that_is_not_done_in_time_has_no_figures_and_comes_first_next_time(instances, make_stage) -> None:
    (instance,) = instances({"slow_token": SLOW})
    stage = make_stage(instance)
    evaluator = stage.evaluator(a_set("letters", 3), a_set("words", 6, slow=(1, 4)), a_set("sums", 2, slow=(0,)))
    under_way = stage.begin(evaluator)
    wait_for(lambda: len(stage.scored) == 8)
    stage.loop.run(evaluator.stop())
    under_way.result(60)
    results = stage.results[0]
    assert [(r.num_prompts, r.total_prompts, r.num_failed) for r in results] == [(3, 3, 0), (4, 6, 0), (1, 2, 0)]
    assert [bool(result.figures) for result in results] == [True, False, False], "those done first are the short ones"
    assert stage.pool.is_idle
    wait_for(lambda: instance.seen()["num_cancelled"] == 3)
    instance.rescript(slow_token=None)
    stage.scored.clear()
    stage.run(evaluator, 1)
    assert [result.set for result in stage.results[1]] == ["letters", "words", "sums"]
    assert [(result.num_prompts, bool(result.figures)) for result in stage.results[1]] == [
        (3, True),
        (6, True),
        (2, True),
    ]
    assert sorted(places(instance)[11:19]) == sorted([*range(6), *range(2)]), "whole sets, those left out first"


def test_an_evaluation_begins_when_other_rollouts_have_ended(instances, make_stage, monkeypatch) -> None:
    (instance,) = instances({})
    stage = make_stage(instance)
    (member,) = stage.pool.members
    member.outstanding_tokens = 100
    looks, is_idle = [], InferencePool.is_idle.fget
    monkeypatch.setattr(InferencePool, "is_idle", property(lambda pool: looks.append(True) or is_idle(pool)))
    under_way = stage.begin(stage.evaluator(a_set("words", 2)))
    wait_for(lambda: len(looks) >= 3)
    assert instance.seen()["requests"] == []
    member.outstanding_tokens = 0
    under_way.result(20)
    assert stage.results[0][0].num_prompts == 2


def test_a_prompt_that_fails_is_counted_and_costs_no_other(instances, make_stage, caplog) -> None:
    stage = make_stage(*instances({}))
    good, bad = a_set("words", 4), a_set("words", 1, broken=True)
    evaluator = stage.evaluator(LoadedSet(good.config, (*good.prompts, *bad.prompts)))
    (result,) = stage.run(evaluator)
    assert (result.num_prompts, result.num_failed, result.total_prompts, result.figures) == (4, 1, 5, {})
    assert "evaluation set words, prompt 0: reward" in caplog.text and "broken row" in caplog.text


def test_a_set_of_several_sources_has_the_figures_of_each(instances, make_stage) -> None:
    stage = make_stage(*instances({}))
    one, other = a_set("words", 3, data_source="one"), a_set("words", 2)
    mixed = LoadedSet(one.config, (*one.prompts, *other.prompts))
    (result,) = stage.run(stage.evaluator(mixed))
    # The even ones are right: two of three, one of two.
    assert result.figures["avg@2"] == pytest.approx(3 / 5)
    assert {name: (each.num_prompts, each.figures["avg@2"]) for name, each in result.sources.items()} == {
        "": (2, pytest.approx(1 / 2)),
        "one": (3, pytest.approx(2 / 3)),
    }
    low, high = result.sources["one"].intervals["avg@2"]
    assert 0 < low < 2 / 3 < high < 1 and result.intervals["avg@2"] != (low, high)
    (alone,) = stage.run(stage.evaluator(one))
    assert alone.sources == {}, "one source is the set itself"
    many = [prompt for i in range(33) for prompt in a_set("words", 1, data_source=str(i)).prompts]
    (row_by_row,) = stage.run(stage.evaluator(LoadedSet(one.config, tuple(many))))
    assert row_by_row.is_complete and row_by_row.sources == {}


def test_a_program_that_fails_costs_its_prompt_only(instances, make_stage, caplog) -> None:
    class Programs:
        async def evaluate(
            self, of_set: EvaluationSet, prompt: Prompt, version: str
        ) -> tuple[list[Trajectory], Scores]:
            if prompt.prompt_id == "1":
                raise RolloutFailed("the environment is gone")
            return [Trajectory.single_turn(make_response())] * 2, Scores((1.0, 1.0))

    stage = make_stage(*instances({}))
    section, results = EvaluationSection(every=1), list[SetResult]()
    parts: Any = stage.pool, Programs(), make_reward(RewardSection()), [a_set("words", 3)]
    stage.loop.run(Evaluator(*parts, section, results.extend).run(0, "v1"))
    assert [(result.num_prompts, result.num_failed) for result in results] == [(2, 1)]
    assert "evaluation set words, prompt 1: the environment is gone" in caplog.text


def test_an_evaluation_without_an_instance_ends_and_says_so(instances, make_stage, caplog) -> None:
    (instance,) = instances({"delay_s": 0.2})
    stage = make_stage(instance)
    evaluator = stage.evaluator(a_set("words", 3))
    stage.pool.remove(stage.pool.members[0].name)
    (result,) = stage.run(evaluator)
    assert (result.num_prompts, result.figures) == (0, {})
    assert "the evaluation ends early" in caplog.text


def test_stopping_what_never_ran_returns_at_once(instances, make_stage) -> None:
    stage = make_stage(*instances({}))
    evaluator = stage.evaluator(a_set("words", 2))
    stage.loop.run(evaluator.stop(), timeout_s=5)
    assert stage.run(evaluator)[0].num_prompts == 2


def test_the_pool_is_evaluated_with_after_the_last_group_of_a_batch_and_free_before_the_next_publish(
    instances, make_stage
) -> None:
    def watch() -> None:
        raise RunStopped("it is told to end before the slow prompt is done")

    (instance,) = instances({"delay_s": 0.1})
    stage = make_stage(instance)
    producer = stage.producer(stage.evaluator(a_set("words", 3), a_set("sums", 1, slow=(0,))))
    instance.rescript(slow_token=SLOW)
    rollouts = Batch(0, {i: Prompt(str(i), (3, 40 + i), {"reward": 1.0}) for i in range(4)})
    with producer.start(rollouts, "v1") as run:
        groups = run.ready(wait=True)
        while len(groups) < 4:
            groups += run.ready(wait=True)
        wait_for(lambda: len(stage.scored) == 3)
        producer.watch = watch
    assert stage.pool.is_idle
    assert [(result.set, result.num_prompts) for result in stage.results[0]] == [("words", 3), ("sums", 0)]
    asked = places(instance)
    assert sorted(asked[:4]) == [30, 31, 32, 33] and sorted(asked[4:]) == [0, 0, 1, 2]


def test_a_batch_that_is_left_early_is_not_evaluated(instances, make_stage) -> None:
    (instance,) = instances({"delay_s": 0.5})
    stage = make_stage(instance)
    producer = stage.producer(stage.evaluator(a_set("words", 3)))
    with pytest.raises(ValueError), producer.start(Batch(0, {0: Prompt("0", (3, 40), {"reward": 1.0})}), "v1"):
        wait_for(lambda: len(places(instance)) == 1)
        raise ValueError
    assert stage.results == [] and stage.pool.is_idle
    producer.close()
    assert places(instance) == [30]
