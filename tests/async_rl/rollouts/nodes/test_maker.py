"""Nodes that run, in processes of their own: what a group gets from them, and what becomes of those that misbehave."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.pipeline_section import PipelineNode
from async_rl.errors import ConfigError, NodeFailed
from async_rl.method.token_arrays import ExpertIds, Logprobs, TokenIds
from async_rl.method.types import Group, Prompt, RolloutFacts
from async_rl.rollouts.nodes.maker import NodeCalls
from async_rl.shared.event_loop import EventLoopThread
from tests.support.groups import make_group, make_response

pytestmark = pytest.mark.distributed

NODES = """
import asyncio, os, time

def style(prompt, responses):
    assert all(r.routes is None for r in responses)
    return [len(r.text) + prompt.row.get("bonus", 0) for r in responses]

async def mixed(rewards, style):
    await asyncio.sleep(0)
    return [reward + 10 * each for reward, each in zip(rewards, style)]

def kept(rollouts):
    return [float(facts.status == "completed") for facts in rollouts]

def weights(responses):
    return [[i % 2 for i in range(r.num_sampled)] for r in responses]

def rewards_of_tokens(responses, reward_parts):
    return [[x - reward_parts.get("a", [0])[0] for x in r.logprobs] for r in responses]

def faulty(prompt):
    fault = prompt.row["fault"]
    if fault == "raises": raise KeyError("no such column")
    if fault == "short": return [1.0]
    if fault == "nan": return [float("nan"), 1.0]
    if fault == "os._exit": os._exit(3)
    if fault == "blocks": time.sleep(3600)
    return [1.0, 1.0]

other = 3

def takes_another(prompts): return []
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nodes") / "nodes.py"
    path.write_text(NODES)
    return path


@pytest.fixture(scope="module")
def shared_loop() -> Iterator[EventLoopThread]:
    loop = EventLoopThread()
    yield loop
    loop.close()


@pytest.fixture
def calls(file: Path, shared_loop: EventLoopThread) -> Iterator[Callable[..., NodeCalls]]:
    made: list[NodeCalls] = []

    def start(*nodes: dict[str, Any]) -> NodeCalls:
        sections = [PipelineNode.model_validate({"function": f"python:{file}:{n['name']}", **n}) for n in nodes]
        made.append(NodeCalls(sections))
        shared_loop.run(made[-1].start())
        return made[-1]

    yield start
    for each in made:
        shared_loop.run(each.close())


def group_of(fault: str | None = None) -> Group:
    responses = [make_response((5, 6, 7), "abc"), make_response((8,), "x", logprobs=[-2.0])]
    rollouts = [RolloutFacts(), RolloutFacts(status="truncated")]
    return make_group(
        3,
        [responses[0], replace(responses[1], routes=ExpertIds([1]))],
        prompt=Prompt("row 3", TokenIds([3, 4]), {"fault": fault, "bonus": 1}),
        rewards=[0.0, 1.0],
        rollouts=rollouts,
    )


def test_a_group_gets_what_all_nodes_write(calls: Callable[..., NodeCalls], shared_loop: EventLoopThread) -> None:
    nodes = calls(
        {"name": "mixed", "reads": ("rewards", "style"), "writes": "shaped_rewards"},
        {"name": "weights", "reads": ("responses",), "writes": "token_weights"},
        {"name": "style", "reads": ("prompt", "responses")},
        {"name": "rewards_of_tokens", "reads": ("responses", "reward_parts"), "writes": "token_rewards"},
        {"name": "kept", "reads": ("rollouts",), "writes": "rollout_weights"},
    )
    given = group_of()
    group = shared_loop.run(nodes.applied(given))
    assert group.rewards == (40.0, 21.0)
    assert group.weights == (1.0, 0.0)
    assert [list(r.token_weights or ()) for r in group.responses] == [[0, 1, 0], [0]]
    assert [list(r.token_rewards or ()) for r in group.responses] == [[-1, -1, -1], [-2]]
    assert dict(group.reward_metrics) == {
        "style": (4.0, 2.0),
        "kept": (1.0, 0.0),
        "mixed": (40.0, 21.0),
        "unshaped": (0.0, 1.0),
    }
    # All else is as it was, the routes too.
    assert group.responses[1].routes == given.responses[1].routes and group.responses[0].token_ids == (5, 6, 7)
    assert type(group.responses[0].token_weights) is Logprobs


FAULTS = {
    "raises": "failed.*in faulty.*no such column",
    "short": "failed.*returned 1 values for faulty: expected 2 finite floats",
    "nan": "returned nan among its values",
    "os._exit": "its process ended .exit code 3.",
    "blocks": r"no answer within pipeline.nodes 'faulty'.timeout_s = 2 s; its process was killed.*time.sleep\(3600\)",
}


def test_a_node_that_misbehaves_is_named_and_the_next_call_works(
    calls: Callable[..., NodeCalls], shared_loop: EventLoopThread
) -> None:
    nodes = calls({"name": "faulty", "reads": ("prompt",), "timeout_s": 2.0})
    for fault, said in FAULTS.items():
        with pytest.raises(NodeFailed, match=f"(?s)pipeline.nodes 'faulty', prompt row 3.*{said}"):
            shared_loop.run(nodes.applied(group_of(fault)))
        assert shared_loop.run(nodes.applied(group_of())).reward_metrics == (("faulty", (1.0, 1.0)),)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing", r"has no function 'missing'; it has \["),
        ("other", "has no function 'other'"),
        ("takes_another", "is called with what the node reads, prompt: .*prompt"),
    ],
)
def test_what_cannot_be_called_is_an_error_of_the_start(name: str, said: str, calls: Callable[..., NodeCalls]) -> None:
    with pytest.raises(ConfigError, match=f"(?s)pipeline.nodes {name!r} cannot be loaded.*{said}"):
        calls({"name": name, "reads": ("prompt",)})


def test_a_name_that_figures_have_already_is_refused(
    calls: Callable[..., NodeCalls], shared_loop: EventLoopThread
) -> None:
    nodes = calls({"name": "style", "reads": ("prompt", "responses")})
    group = shared_loop.run(nodes.applied(group_of()))
    with pytest.raises(NodeFailed, match="'style': the reward has a part or a metric of this name"):
        shared_loop.run(nodes.applied(group))
