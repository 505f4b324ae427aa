"""Calls a user's nodes for each group that has been scored, and gives the group what they write."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from async_rl.config.evaluation_section import EvaluationSet
from async_rl.config.pipeline import OF_TOKENS, ROLLOUT_WEIGHTS, SHAPED_REWARDS, TOKEN_REWARDS, TOKEN_WEIGHTS, waves_of
from async_rl.config.pipeline_section import PipelineNode
from async_rl.errors import NodeFailed
from async_rl.method.token_arrays import Logprobs
from async_rl.method.types import UNSHAPED, Group, Prompt, Response, Scores, WeightVersion
from async_rl.rollouts.groups.group_maker import GroupMaker
from async_rl.rollouts.groups.trajectory import Trajectory
from async_rl.rollouts.nodes.results import numbers_of
from async_rl.rollouts.rewards.base import gathered
from async_rl.shared.workers.function import FunctionFailed, Limits, WatchedFunction


class NodeCalls:
    """The nodes of one pipeline, each in processes of its own; methods run on the producer's event loop."""

    def __init__(self, nodes: Sequence[PipelineNode]) -> None:
        self._waves = waves_of(nodes)
        self._functions = {node.name: _watched(node) for node in nodes}

    async def start(self) -> None:
        """
        Raises:
            ConfigError: the function of a node cannot be loaded, or is not called with what the node reads.
        """
        await gathered(function.start() for function in self._functions.values())

    async def close(self) -> None:
        await asyncio.gather(*(function.close() for function in self._functions.values()))

    async def applied(self, group: Group) -> Group:
        """The group with what all nodes write; those that need nothing of each other are called at once.

        Raises:
            NodeFailed: a node raised, hung or returned something else, as often as it is tried.
        """
        plain = [replace(response, routes=None, prompt_routes=None) for response in group.responses]
        data: dict[str, Any] = {
            "prompt": group.prompt,
            "responses": tuple(plain),
            "rollouts": group.rollouts,
            "rewards": group.rewards,
            "reward_parts": dict(group.reward_parts),
        }
        for wave in self._waves:
            results = await gathered(self._call(node, data, group) for node in wave)
            data |= {node.written: result for node, result in zip(wave, results, strict=True)}
        return with_results(group, data, [node for wave in self._waves for node in wave])

    async def _call(self, node: PipelineNode, data: Mapping[str, Any], group: Group) -> list[Any]:
        sizes = (len(group.rollouts), tuple(response.num_sampled for response in group.responses))
        arguments = {name: data[name] for name in node.reads}
        try:
            returned = await self._functions[node.name].call((arguments, *sizes), f"prompt {group.prompt.prompt_id}")
            return numbers_of(node.written, returned, *sizes)
        except (FunctionFailed, ValueError) as error:
            raise NodeFailed(str(error)) from error


class WithNodes:
    """Implements `GroupMaker`: groups of another one, with what the nodes write. Evaluations have the reward alone."""

    def __init__(self, maker: GroupMaker, nodes: Sequence[PipelineNode]) -> None:
        self._maker = maker
        self._calls = NodeCalls(nodes)

    async def start(self) -> None:
        await gathered([self._maker.start(), self._calls.start()])

    async def close(self) -> None:
        await asyncio.gather(self._maker.close(), self._calls.close())

    async def group(self, iteration: int, index: int, prompt: Prompt, version: WeightVersion) -> Group:
        group = await self._calls.applied(await self._maker.group(iteration, index, prompt, version))
        return replace(group, finished_s=time.monotonic())

    async def evaluate(
        self, of_set: EvaluationSet, prompt: Prompt, version: WeightVersion
    ) -> tuple[Sequence[Trajectory], Scores]:
        return await self._maker.evaluate(of_set, prompt, version)

    def take_figures(self) -> Mapping[str, Any]:
        return self._maker.take_figures()


def with_results(group: Group, data: Mapping[str, Any], nodes: Sequence[PipelineNode]) -> Group:
    """The group with its rewards, weights and tokens' numbers as `data` has them; numbers of rollouts are shown as
    metrics of the reward, by the names of their nodes.

    Raises:
        NodeFailed: the reward has a part or a metric of that name already.
    """
    shown = [(node.name, tuple(data[node.written])) for node in nodes if node.written not in OF_TOKENS]
    if SHAPED_REWARDS in data:
        shown.append((UNSHAPED, group.rewards))
    taken = {label for label, _ in (*group.reward_parts, *group.reward_metrics)}
    if twice := taken & {name for name, _ in shown}:
        raise NodeFailed(
            f"pipeline.nodes {min(twice)!r}: the reward has a part or a metric of this name, and figures would mix "
            "them: give the node another name"
        )
    rollouts = group.rollouts
    if ROLLOUT_WEIGHTS in data:
        weights = data[ROLLOUT_WEIGHTS]
        rollouts = tuple(replace(facts, weight=weight) for facts, weight in zip(rollouts, weights, strict=True))
    return replace(
        group,
        rewards=tuple(data.get(SHAPED_REWARDS, group.rewards)),
        rollouts=rollouts,
        responses=tuple(_with_tokens(response, data, i) for i, response in enumerate(group.responses)),
        reward_metrics=(*group.reward_metrics, *shown),
    )


def _with_tokens(response: Response, data: Mapping[str, Any], number: int) -> Response:
    weights, rewards = (
        Logprobs(data[name][number]) if name in data else None for name in (TOKEN_WEIGHTS, TOKEN_REWARDS)
    )
    return replace(response, token_weights=weights, token_rewards=rewards)


def _watched(node: PipelineNode) -> WatchedFunction:
    limits = Limits(
        f"pipeline.nodes {node.name!r}", node.timeout_s, node.num_workers, node.max_concurrency, node.max_attempts
    )
    module = "async_rl.rollouts.nodes.worker"
    return WatchedFunction(f"pipeline.nodes {node.name!r}", module, node.model_dump_json(), limits)
