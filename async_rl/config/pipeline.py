"""What happens to a group from its prompt to its gradient, as a graph: the algorithm's own stages and a user's nodes.

DistFlow (arXiv 2507.13833) has an algorithm be a graph of nodes with a role and a kind each, which a planner puts in an
order. Here the graph of a config is checked before anything starts, drawn by `async-rl plan --graph`, and its part in
the producer is run from it (`rollouts/nodes/`). Without torch.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Literal

from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.keys import nearest
from async_rl.config.pipeline_section import PipelineNode
from async_rl.config.reward_section import RewardSection
from async_rl.config.rollout_section import SINGLE_TURN
from async_rl.errors import ConfigError

Place = Literal["instances", "producer", "service", "trainer"]
Kind = Literal["inference", "computation", "training"]

SHAPED_REWARDS, ROLLOUT_WEIGHTS = "shaped_rewards", "rollout_weights"
TOKEN_WEIGHTS, TOKEN_REWARDS = "token_weights", "token_rewards"
OF_TOKENS = (TOKEN_WEIGHTS, TOKEN_REWARDS)

FOR_TRAINING: Mapping[str, str] = {
    SHAPED_REWARDS: "a number per rollout, which advantages are made of in place of the reward",
    ROLLOUT_WEIGHTS: "a number of 0 or more per rollout, what it counts in loss and denominator; 0 leaves it out",
    TOKEN_WEIGHTS: "for each response a number of 0 or more per sampled token, which its loss is multiplied by",
    TOKEN_REWARDS: "for each response a number per sampled token, which is added to its advantage",
}
"""What a user's node may write for the training, besides numbers per rollout that other nodes read."""

UNSHAPED = "unshaped"
"""As figures call the reward where a node writes another one (`method.types.UNSHAPED`)."""

READABLE = ("prompt", "responses", "rollouts", "rewards", "reward_parts")
"""What a user's node may read besides what others write: `Prompt`, `Response`s, `RolloutFacts`, one float per rollout,
and label -> floats."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of the way of a group. `weights` are those it computes with: of the version in training, of the step
    before, fixed ones, its own; "" for none."""

    name: str
    role: str
    kind: Kind
    place: Place
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    weights: str = ""


class Pipeline:
    """The stages of a config, in an order in which each follows what it reads; of several such the declared one.

    Raises:
        ConfigError: what a stage reads is written by none, or by two, or depends on what it writes.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        writers = _writers(stages)
        _require_written(stages, writers)
        after = {stage.name: {writers[name].name for name in stage.reads} for stage in stages}
        sorter = TopologicalSorter(after)
        try:
            sorter.prepare()
        except CycleError as error:
            raise ConfigError(
                f"pipeline.nodes depend on each other in a circle, {' -> '.join(error.args[1])}: each may read only "
                "what is there before it"
            ) from error
        by_name = {stage.name: stage for stage in stages}
        self.waves: list[list[Stage]] = []
        while names := sorter.get_ready():
            self.waves.append([stage for name, stage in by_name.items() if name in names])
            sorter.done(*names)

    @property
    def stages(self) -> list[Stage]:
        return [stage for wave in self.waves for stage in wave]


def pipeline_of(
    program: str, reward: RewardSection, nodes: Sequence[PipelineNode], algorithm: AlgorithmSection
) -> Pipeline:
    """The stages that a run has with these settings; `program` is `rollout.program`.

    Raises:
        ConfigError: the nodes do not fit together, or not to the algorithm.
    """
    written = {node.written for node in nodes}
    labels = reward.weights if reward.parts else reward.single_rewards
    for node in nodes:
        _require_name(node.name, labels)
    pipeline = Pipeline([*_sources(program, reward), *map(_of_user, nodes), *_of_training(algorithm, written)])
    for node in nodes:
        _require_of_algorithm(algorithm, node)
    return pipeline


def waves_of(nodes: Sequence[PipelineNode]) -> list[list[PipelineNode]]:
    """The nodes of a checked config, in the order of their calls; those of one wave run beside each other."""
    by_name = {node.name: node for node in nodes}
    # No node has its name.
    sources = Stage("", "", "computation", "producer", (), READABLE)
    waves = Pipeline([sources, *map(_of_user, nodes)]).waves if nodes else []
    return [[by_name[stage.name] for stage in wave] for wave in waves if wave != [sources]]


def _require_name(name: str, labels: Collection[str]) -> None:
    """
    Raises:
        ConfigError: figures, or what is trained, would take a node's numbers for something else.
    """
    if name in (*FOR_TRAINING, UNSHAPED):
        remedy = "set `writes` to it, and the name to another word" if name in FOR_TRAINING else "choose another"
        raise ConfigError(f"pipeline.nodes has the name {name!r}, which means something else: {remedy}")
    if name in labels:
        raise ConfigError(
            f"pipeline.nodes has the name {name!r}, which the reward has, too, and figures would mix: choose another"
        )


def _of_user(node: PipelineNode) -> Stage:
    return Stage(node.name, "node", "computation", "producer", node.reads, (node.written,))


def _sources(program: str, reward: RewardSection) -> list[Stage]:
    rewards = ("rewards", "reward_parts")
    made = ("responses", "rollouts", "rollout_logprobs")
    stages = [
        Stage("prompts", "prompts", "computation", "producer", (), ("prompt",)),
        Stage(
            *("rollout", "rollout" if program == SINGLE_TURN else "rollout program", "inference", "instances"),
            *(("prompt",), made if reward.is_given else made + rewards, "of the version in training"),
        ),
    ]
    if reward.is_given:
        place: Place = "service" if reward.name in ("http", "judge") else "producer"
        stages.append(Stage("reward", "reward", "computation", place, ("prompt", "responses"), rewards))
    return stages


def _of_training(algorithm: AlgorithmSection, written: Set[str]) -> list[Stage]:
    rewards: tuple[str, ...] = (SHAPED_REWARDS if SHAPED_REWARDS in written else "rewards",)
    if algorithm.name == "gdpo":
        rewards = ("reward_parts",)
    elif algorithm.name == "distillation":
        rewards = ()
    weights = (ROLLOUT_WEIGHTS,) if ROLLOUT_WEIGHTS in written else ()
    own = tuple(name for name in OF_TOKENS if name in written)
    scored: list[str] = []
    stages: list[Stage] = []

    def scores(name: str, role: str, writes: str, of: str) -> None:
        stages.append(Stage(name, role, "inference", "trainer", ("prompt", "responses"), (writes,), of))
        scored.append(writes)

    if algorithm.needs_reference:
        scores("reference", "reference policy", "ref_logprobs", "of the start, fixed")
    if algorithm.old_policy in ("model", "lagged"):
        is_before = algorithm.old_policy == "lagged"
        scores("old", "old policy", "old_logprobs", "of the step before" if is_before else "of the version in training")
    if algorithm.teacher is not None:
        scores("teacher", "teacher", "teacher_logprobs", "its own, fixed")
    shaping = ("ref_logprobs",) if algorithm.kl_coef > 0 and algorithm.kl_in == "reward" else ()
    if algorithm.waits_for_batch:
        stages.append(Stage("totals", "whole batch", "computation", "trainer", (*rewards, *weights), ("totals",)))
    of_rewards = (*rewards, *weights, *shaping, *(["totals"] if algorithm.waits_for_batch else []))
    if algorithm.traits.values:
        reads = ("prompt", "responses", *of_rewards)
        stages.append(Stage("critic", "critic", "training", "trainer", reads, ("values",), "its own"))
    of_values = ("values",) if algorithm.traits.values else ()
    advantages = ("advantages",) if of_rewards else ()
    if advantages:
        stages.append(Stage("advantage", "advantage", "computation", "trainer", (*of_rewards, *of_values), advantages))
    reported = algorithm.importance != "none" or algorithm.old_policy == "rollout"
    reads = (
        *("prompt", "responses", *advantages),
        *(name for name in scored if name not in shaping),
        *(("rollout_logprobs",) if reported else ()),
        *own,
    )
    stages.append(Stage("policy", "policy", "training", "trainer", reads, ("gradient",), "of the version in training"))
    return stages


def _writers(stages: Iterable[Stage]) -> dict[str, Stage]:
    writers: dict[str, Stage] = {}
    names: set[str] = set()
    for stage in stages:
        if stage.name in names:
            raise ConfigError(f"pipeline.nodes has the name {stage.name!r}, which another stage has: choose another")
        names.add(stage.name)
        for name in stage.writes:
            if name in writers:
                raise ConfigError(
                    f"pipeline.nodes: {name!r} is written by {writers[name].name!r} and by {stage.name!r}: give one "
                    "of them another `writes`" + (_remedy(name) if name in READABLE else "")
                )
            writers[name] = stage
    return writers


def _remedy(name: str) -> str:
    return f"; to change what is trained, write {SHAPED_REWARDS!r}" if name == "rewards" else ""


def _require_written(stages: Sequence[Stage], writers: Mapping[str, Stage]) -> None:
    for stage in stages:
        for name in stage.reads:
            place = writers[name].place if name in writers else None
            if stage.role == "node" and place is not None and place == "trainer":
                raise ConfigError(
                    f"pipeline.nodes {stage.name!r} reads {name!r}, which the trainer makes after the last node: "
                    f"expected {_there(writers, stage)}; what needs log-probs of the trainer is an algorithm of your "
                    "own (algorithms.md)"
                )
            if stage.role == "node" and name == "rollout_logprobs":
                raise ConfigError(
                    f"pipeline.nodes {stage.name!r} reads 'rollout_logprobs': they are in 'responses', as `.logprobs`"
                )
            if place is None:
                near = nearest(name, writers)
                meant = f"did you mean {near!r}? " if near else ""
                raise ConfigError(
                    f"pipeline.nodes {stage.name!r} reads {name!r}, which nothing writes: {meant}expected "
                    f"{_there(writers, stage)}"
                )


def _there(writers: Mapping[str, Stage], reader: Stage) -> str:
    """What a node may read: of other nodes it is what these write."""
    others = {name: stage for name, stage in writers.items() if stage.role == "node" and stage != reader}
    of_nodes = [name for name in others if name not in FOR_TRAINING]
    return ", ".join([*READABLE, *of_nodes])


def _require_of_algorithm(algorithm: AlgorithmSection, node: PipelineNode) -> None:
    writes = f"pipeline.nodes {node.name!r} writes {node.written!r}, but"
    named = f"algorithm.name = {algorithm.name!r}"
    if node.written in OF_TOKENS and (algorithm.traits.whole_groups or algorithm.traits.values):
        does = "compares whole rollouts" if algorithm.traits.whole_groups else "has advantages from a critic"
        raise ConfigError(
            f"{writes} {named} {does}, and has no place for numbers of tokens: choose another algorithm, or write what "
            "counts per rollout"
        )
    if node.written == TOKEN_REWARDS and algorithm.is_scaled_by_batch and not algorithm.waits_for_batch:
        raise ConfigError(
            f"{writes} a deviation over the batch divides advantages as a factor of the whole sum, and would divide "
            "these, too: set algorithm.scale_by_std to true or false"
        )
    if node.written == SHAPED_REWARDS and algorithm.name == "gdpo":
        raise ConfigError(f"{writes} {named} is made of the parts of the reward: make it a part in [[reward.parts]]")
    if node.written == SHAPED_REWARDS and algorithm.name == "distillation":
        raise ConfigError(f"{writes} {named} trains no reward: write {TOKEN_REWARDS!r}, or choose another algorithm")
