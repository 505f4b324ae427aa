"""The graph of a config: what it has, in what order, and what does not fit together."""

import random
from typing import Any

import pytest

from async_rl.config import pipeline
from async_rl.config.algorithm_traits import TRAITS
from async_rl.config.pipeline import FOR_TRAINING, READABLE, waves_of
from async_rl.config.pipeline_section import PipelineNode
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.method import types
from async_rl.method.algorithms import make_algorithm
from tests.support import minimal_config
from tests.support.algorithm_options import PARTS, random_settings

FUNCTION = "python:nodes.py:function"


def config_of(nodes: list[dict[str, Any]] | None = None, **algorithm: Any) -> Config:
    pipeline = {"nodes": [{"function": FUNCTION, **node} for node in nodes or []]}
    return minimal_config.config_of(algorithm=algorithm, pipeline=pipeline)


def node(name: str, *reads: str, writes: str | None = None) -> dict[str, Any]:
    return {"name": name, "reads": list(reads), "writes": writes}


@pytest.mark.parametrize("name", TRAITS)
def test_the_graph_of_an_algorithm_has_what_the_algorithm_needs(name: str, rng: random.Random) -> None:
    for _ in range(30):
        settings = random_settings(name, rng)
        config = minimal_config.config_of(
            algorithm=settings,
            train={"mode": "synchronous"},
            rollout={"max_response_tokens": 64},
            trainer={"micro_batch_tokens": 10**6},
            reward={"name": None, "parts": [{"name": "math", "label": label} for label in PARTS]},
        )
        pipeline, needs = config.graph, make_algorithm(config.algorithm, 64).needs
        names = {stage.name for stage in pipeline.stages}
        assert ("reference" in names) == needs.reference == config.algorithm.needs_reference
        assert ("teacher" in names) == needs.teacher
        assert ("critic" in names) == needs.values
        assert ("totals" in names) == needs.totals
        reads = {stage.name: stage.reads for stage in pipeline.stages}
        assert ("rewards" in reads.get("advantage", ())) == (name not in ("gdpo", "distillation"))
        assert ("ref_logprobs" in (*reads.get("advantage", ()), *reads.get("critic", ()))) >= needs.reward_kl
        reported = needs.rollout or config.algorithm.old_policy == "rollout"
        assert ("rollout_logprobs" in reads["policy"]) == reported
        assert ("old" in names) == (config.algorithm.old_policy in ("model", "lagged"))


def test_each_stage_follows_what_it_reads_whatever_the_order_of_the_nodes(rng: random.Random) -> None:
    for _ in range(50):
        names = ["sources", "critic", *(f"n{i}" for i in range(rng.randint(1, 8)))]
        nodes = [node(name, *rng.sample([*READABLE, *names[:i]], rng.randint(1, 3))) for i, name in enumerate(names)]
        rng.shuffle(nodes)
        config = config_of(nodes)
        pipeline = config.graph
        made: set[str] = set()
        for wave in pipeline.waves:
            assert all(made.issuperset(stage.reads) for stage in wave)
            made |= {name for stage in wave for name in stage.writes}
        waves = waves_of(config.pipeline.nodes)
        assert sorted(each.name for wave in waves for each in wave) == sorted(names)
        made = set(READABLE)
        for calls in waves:
            assert all(made.issuperset(each.reads) for each in calls)
            made |= {each.written for each in calls}
    assert waves_of(()) == []


def test_what_a_node_writes_is_read_in_the_place_of_the_reward() -> None:
    graph = config_of([node("mixed", "rewards", writes="shaped_rewards")]).graph
    (advantage,) = (stage for stage in graph.stages if stage.name == "advantage")
    assert "shaped_rewards" in advantage.reads and "rewards" not in advantage.reads
    for name in FOR_TRAINING:
        stages = config_of([node("x", "rewards", writes=name)]).graph.stages
        assert [stage.role for stage in stages if name in stage.reads], f"nothing reads {name}"
    assert pipeline.UNSHAPED == types.UNSHAPED


CRITIC = {"name": "ppo"}
WRONG: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    ([node("a", "b"), node("b", "c"), node("c", "a")], {}, "in a circle, a -> .* -> a: each may read only"),
    ([node("a", "a")], {}, "in a circle, a -> a"),
    ([node("a", "x"), node("b", "prompt")], {}, "reads 'x', which nothing writes: expected .*, reward_parts, b$"),
    ([node("a", "reward")], {}, "reads 'reward', which nothing writes: did you mean 'rewards'.*expected prompt, resp"),
    ([node("rewards", "prompt")], {}, "'rewards' is written by 'reward' and by 'rewards'.*'shaped_rewards'"),
    (
        [node("a", "rewards", writes="token_weights"), node("b", "rewards", writes="token_weights")],
        {},
        "'token_weights' is written by 'a' and by 'b'",
    ),
    ([node("a", "rewards", writes="shaped_reward")], {}, "Input should be 'shaped_rewards', 'rollout_weights'"),
    ([node("token_weights", "rewards")], {}, "set `writes` to it, and the name to another word"),
    ([node("unshaped", "rewards")], {}, "means something else: choose another"),
    ([node("math", "rewards")], {}, "which the reward has, too, and figures would mix"),
    (
        [node("a", "rewards", writes="shaped_rewards")],
        {"name": "distillation", "teacher": "t"},
        "'distillation' trains no reward",
    ),
    ([node("a", "rewards"), node("a", "rewards", writes="token_weights")], {}, "the name 'a', which another stage has"),
    ([node("policy", "rewards")], {}, "the name 'policy', which another stage has"),
    ([node("advantages", "rewards")], {}, "'advantages' is written by 'advantages' and by 'advantage'"),
    ([node("a", "advantages")], {}, "which the trainer makes after the last node"),
    ([node("a", "ref_logprobs")], {"kl_coef": 0.1}, "which the trainer makes after the last node"),
    ([node("a", "rollout_logprobs")], {}, "they are in 'responses', as `.logprobs`"),
    ([node("a", "rewards", writes="token_weights")], CRITIC, "'ppo' has advantages from a critic"),
    ([node("a", "rewards", writes="token_rewards")], {"name": "online_dpo"}, "'online_dpo' compares whole rollouts"),
    ([node("a", "rewards", writes="token_rewards")], {"name": "gdpo"}, "a deviation over the batch divides"),
    ([node("a", "rewards", writes="shaped_rewards")], {"name": "gdpo"}, "make it a part in"),
    ([node("a", "rewards", "rewards")], {}, "it names one twice"),
    ([node("a", "lambda")], {}, "is a word of Python"),
    ([node("a")], {}, "at least 1 item"),
    ([node("A B", "rewards")], {}, "small letters, digits and '_'"),
    ([{**node("a", "rewards"), "function": "nodes.py"}], {}, "expected python:path/to/file.py:function"),
]


@pytest.mark.parametrize(("nodes", "algorithm", "said"), WRONG)
def test_what_does_not_fit_together_is_named(nodes: list[dict[str, Any]], algorithm: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of(nodes, **algorithm)


def test_a_program_that_rewards_itself_is_the_one_that_writes_rewards() -> None:
    config = minimal_config.config_of(
        reward={"name": None},
        rollout={"program": "python:program.py:run"},
        pipeline={"nodes": [{**node("a", "rewards"), "function": FUNCTION}]},
    )
    pipeline = config.graph
    assert [stage.name for stage in pipeline.stages if "rewards" in stage.writes] == ["rollout"]


def test_a_node_writes_by_its_own_name() -> None:
    assert PipelineNode(name="style", function=FUNCTION, reads=("rewards",)).written == "style"
