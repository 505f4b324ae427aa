"""The configuration of a run as pydantic models; `file.py` reads one. Its imports are light.

Every entry point loads it first and passes each part only its own section. Unknown keys are errors.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from async_rl.config.adapter_section import ENABLE_LORA, VLLM_RANKS, AdapterSection
from async_rl.config.algorithm_section import SHAPING, WHOLE_REWARD, AlgorithmSection
from async_rl.config.algorithm_traits import GDPOOptions
from async_rl.config.cluster_section import ClusterSection
from async_rl.config.evaluation_section import EvaluationSection
from async_rl.config.keys import as_toml
from async_rl.config.pipeline import Pipeline, pipeline_of
from async_rl.config.pipeline_section import PipelineSection
from async_rl.config.pool_section import PoolSection, PublishSection
from async_rl.config.prompts_section import PromptsSection
from async_rl.config.reward_section import RewardSection
from async_rl.config.rollout_section import SINGLE_TURN, RolloutSection
from async_rl.config.section import ProgramText, Section
from async_rl.config.train_section import OptimizerSection, TrainSection
from async_rl.config.trainer_section import TrainerSection
from async_rl.config.transport import faults_of_transport
from async_rl.errors import ConfigError


class RunSection(Section):
    dir: Path = Field(description="where metrics, ledger, checkpoints and logs of this run go")
    resume: bool = Field(False, description="go on from the newest checkpoint in run.dir, or start where there is none")
    accept_changes: bool = Field(
        False,
        description="go on though settings, prompts or reward differ from the checkpoint's, or proofs are missing; the "
        "log names them",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="decides the order of prompts and every sampling seed")
    placement: Literal["separate", "shared", "turns"] = Field(
        "separate",
        description="instances have devices of their own, share those of the training ranks, with both pools in memory "
        "at once, or take turns with them (see placement.md)",
    )


class ModelSection(Section):
    path: str = Field(description="Hugging Face checkpoint: a directory or a hub name")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of weights and activations, in both pools")


class CheckpointSection(Section):
    every: int = Field(50, ge=0, description="iterations between checkpoints; 0 saves none")
    keep: int = Field(2, ge=1, description="how many checkpoints stay, the newest ones")
    grace_s: float = Field(
        120.0, gt=0, description="how long a run that ends early may take to save and end; launchers wait for it"
    )


class TrackingSection(Section):
    """Which experiment trackers get a run's figures; `metrics.jsonl` is always written."""

    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = Field(
        ("tensorboard",),
        description="any of tensorboard, wandb, mlflow, trackio; each but the first is an extra",
    )
    project: str = Field(
        "async-rl", min_length=1, description="what trackers file the run under, by the name of run.dir"
    )
    all_responses: bool = Field(
        False, description="samples.jsonl has the texts of all responses of its groups, not of two"
    )

    @property
    def extras(self) -> tuple[str, ...]:
        """Of async-rl, that the trainer needs for its trackers."""
        return tuple(name for name in self.trackers if name != "tensorboard")


class InferenceSection(Section):
    """Instances that `deploy` starts; a run with instances started elsewhere only sets `pool.instances`."""

    engine: Literal["transformers", "vllm"] = Field("transformers", description="the embedded engine, or vLLM's server")
    python: str | None = Field(None, description="the interpreter that has the engine; by default the launcher's own")
    num_instances: int = Field(1, ge=1, description="processes to start")
    tensor_parallel: int = Field(1, ge=1, description="workers of one instance; vllm only")
    max_concurrency: int = Field(64, ge=1, description="responses generated at once")
    engine_options: tuple[ProgramText, ...] = Field((), description="further arguments of vLLM's own server")


@dataclass(frozen=True, slots=True)
class _Need:
    """Settings of a section that have an effect where the config `is_met`, which `remedy` brings about."""

    section: str
    keys: str
    is_met: Callable[["Config"], bool]
    remedy: str


NEEDS = (
    _Need("reward", "column", lambda c: bool(c.reward.parts), "[[reward.parts]], which its rows name"),
    _Need("adapter", "alpha targets path publish", lambda c: c.adapter.is_given, "adapter.rank"),
    _Need("algorithm", "teacher_coef", lambda c: c.algorithm.teacher is not None, "algorithm.teacher"),
    _Need(
        "inference",
        "tensor_parallel engine_options",
        lambda c: c.inference.engine == "vllm",
        "inference.engine to 'vllm'",
    ),
)
"""What would be left without an effect otherwise, silently. A switch that is off keeps its settings, so that one
override is enough to compare with and without: `algorithm.kl_coef` = 0, no reward, `evaluation.every` without sets."""


class Config(Section):
    run: RunSection
    model: ModelSection
    prompts: PromptsSection
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    reward: RewardSection = Field(default_factory=RewardSection)
    pool: PoolSection = Field(default_factory=PoolSection)
    publish: PublishSection = Field(default_factory=PublishSection)
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    pipeline: PipelineSection = Field(default_factory=PipelineSection)
    adapter: AdapterSection = Field(default_factory=AdapterSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    train: TrainSection
    trainer: TrainerSection = Field(default_factory=TrainerSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    inference: InferenceSection = Field(default_factory=InferenceSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)
    cluster: ClusterSection = Field(default_factory=ClusterSection)

    @property
    def max_model_len(self) -> int | None:
        """Tokens of a prompt and a response that an instance has to accept; None for as many as its model takes."""
        if self.rollout.program == SINGLE_TURN:
            return self.prompts.max_prompt_tokens + self.rollout.max_response_tokens
        return self.rollout.options.max_context_tokens

    @property
    def graph(self) -> Pipeline:
        """What happens to a group from its prompt to its gradient."""
        return pipeline_of(self.rollout.program, self.reward, self.pipeline.nodes, self.algorithm)

    @property
    def publishes_adapters(self) -> bool:
        """Whether a publish sends adapters alone, and not merged into the weights.

        vLLM computes with adapters only where it was started for that. Instances that take turns with the trainer drop
        their weights each time, and so need all of them.
        """
        if not self.adapter.is_given or self.adapter.publish != "auto":
            return self.adapter.is_given and self.adapter.publish == "adapters"
        engine = self.inference.engine == "transformers" or ENABLE_LORA in self.inference.engine_options
        return engine and self.run.placement != "turns"

    @property
    def engine_options(self) -> tuple[str, ...]:
        """Those of `inference`, with what vLLM needs for adapters that are published alone."""
        options = self.inference.engine_options
        return self.adapter.vllm_options(options) if self.starts_vllm_for_adapters else options

    @property
    def starts_vllm_for_adapters(self) -> bool:
        """Whether adapters are published alone to a vLLM that a launcher starts."""
        return self.publishes_adapters and self.inference.engine == "vllm" and not self.pool.instances

    def with_iterations(self, num_prompts: int) -> "Config":
        """With the number of iterations that `train.epochs` of so many prompts are, if these are what it has.

        A last batch that crosses the end of an epoch is filled from the next one.

        Raises:
            ConfigError: the critic would be alone in all of them.
        """
        if self.train.epochs is None:
            return self
        # 0.1 of 30 are a little more than 3 as floats.
        iterations = max(1, ceil(self.train.epochs * num_prompts / self.prompts.num_drawn - 1e-9))
        counted = self.model_copy(update={"train": self.train.model_copy(update={"iterations": iterations})})
        for fault in counted._the_critic_is_not_always_alone():
            raise ConfigError(fault)
        return counted

    @model_validator(mode="before")
    @classmethod
    def _has_a_train_section(cls, tree: Any) -> Any:
        # None of its keys is required alone, so that the section's own error names what is missing.
        return {"train": {}} | tree if isinstance(tree, dict) else tree

    @model_validator(mode="after")
    def _has_no_contradictions(self) -> "Config":
        """Names all contradictions between sections at once."""
        checks = (
            self._weights_have_a_way,
            self._something_rewards,
            self._epochs_can_be_counted,
            self._the_critic_is_not_always_alone,
            self._mixtures_name_rewards_that_exist,
            self._weights_are_of_parts_that_exist,
            self._several_steps_have_an_old_model,
            self._a_reserve_can_be_selected_from,
            self._overlong_tokens_are_part_of_a_response,
            self._whole_batches_are_waited_for,
            self._whole_groups_fit_a_micro_batch,
            self._groups_can_be_compared,
            self._instances_have_a_range,
            self._nodes_fit_together,
            self._adapters_find_their_base,
            self._settings_have_an_effect,
        )
        if faults := [fault for check in checks for fault in check()]:
            raise ValueError("\n".join(faults))
        self.require_prompts_for(self.trainer.num_local_ranks * self.cluster.training_nodes)
        return self

    def _weights_have_a_way(self) -> Iterator[str]:
        return faults_of_transport(self.run.placement, self.publish, self.inference.engine, self.trainer, self.cluster)

    def _something_rewards(self) -> Iterator[str]:
        if not self.reward.is_given and self.rollout.program == SINGLE_TURN:
            yield (
                f"reward.name is not set, but rollout.program = {SINGLE_TURN!r} needs a reward: set it to math, code, "
                "another of rewards.md, or python:path/to/file.py:function"
            )

    def _epochs_can_be_counted(self) -> Iterator[str]:
        if self.train.epochs is not None and len(self.prompts.mixture) > 1:
            yield (
                f"train.epochs is {self.train.epochs:g}, but prompts.mixture has {len(self.prompts.mixture)} parts, "
                "each of which begins its next epoch by its weight: set train.iterations instead"
            )

    def _the_critic_is_not_always_alone(self) -> Iterator[str]:
        alone, iterations = self.algorithm.critic.critic_iterations_alone, self.train.iterations
        if iterations is not None and alone >= iterations:
            of_epochs = f" (train.epochs = {self.train.epochs:g})" if self.train.epochs is not None else ""
            yield (
                f"algorithm.options.critic_iterations_alone is {alone}, but train.iterations is "
                f"{iterations}{of_epochs}: the policy would never learn; lower the one or raise the other"
            )

    def _mixtures_name_rewards_that_exist(self) -> Iterator[str]:
        labels = self.reward.weights
        for part in self.prompts.mixture:
            if unknown := [label for label in part.reward if label not in labels]:
                expected = ", ".join(labels) or "[[reward.parts]], of which there are none"
                yield (
                    f"prompts.mixture {part.name!r} has the reward {unknown[0]!r}: expected one or several of "
                    f"{expected}"
                )

    def _weights_are_of_parts_that_exist(self) -> Iterator[str]:
        weights = self.algorithm.options.get("weights")
        if self.algorithm.traits.options is not GDPOOptions or not isinstance(weights, dict):
            return
        labels = list(self.reward.weights)
        if not labels or self.rollout.program != SINGLE_TURN:
            # A program may give a reward of its own, which has no parts.
            labels.append(WHOLE_REWARD)
        if unknown := [name for name in weights if name not in (*labels, SHAPING)]:
            yield (
                f"algorithm.options.weights has {unknown[0]!r}: expected parts of the reward, {', '.join(labels)}, or "
                f"{SHAPING}"
            )

    def _several_steps_have_an_old_model(self) -> Iterator[str]:
        if self.train.steps_per_batch > 1 and self.algorithm.old_policy != "model":
            yield (
                f"train.steps_per_batch is {self.train.steps_per_batch} with algorithm.old_policy = "
                f"{self.algorithm.old_policy!r}: after its first step the policy is not the one that sampled; "
                "set algorithm.old_policy to 'model'"
            )

    def _a_reserve_can_be_selected_from(self) -> Iterator[str]:
        reserve = self.prompts.reserve
        if reserve and self.train.steps_per_batch > 1:
            yield (
                f"prompts.reserve is {reserve} with train.steps_per_batch = {self.train.steps_per_batch}: prompts are "
                "divided among steps by index, before it is known which ones are selected; set prompts.reserve = 0 or "
                "train.steps_per_batch = 1"
            )
        if reserve and self.rollout.responses_per_prompt == 1:
            yield (
                f"prompts.reserve is {reserve} with rollout.responses_per_prompt = 1: it avoids prompts whose rewards "
                "are all equal, as a single one always is; set prompts.reserve = 0 or more responses"
            )
        if reserve and self.algorithm.traits.single_rollouts:
            yield (
                f"prompts.reserve is {reserve} with algorithm.name = {self.algorithm.name!r}: it avoids prompts whose "
                "rewards are all equal, but this algorithm does not compare the rewards of a prompt, and learns "
                "from such prompts, too; set prompts.reserve = 0"
            )

    def _overlong_tokens_are_part_of_a_response(self) -> Iterator[str]:
        overlong, limit = self.algorithm.overlong_tokens, self.rollout.max_response_tokens
        if overlong is not None and overlong > limit:
            yield (
                f"algorithm.overlong_tokens is {overlong}, but rollout.max_response_tokens is {limit}: it is the last "
                "part of them, a quarter for example"
            )

    def _whole_batches_are_waited_for(self) -> Iterator[str]:
        algorithm = self.algorithm
        if algorithm.waits_for_batch and self.train.mode != "synchronous":
            adds = "" if algorithm.traits.totals else " with KL, entropy or a teacher beside it"
            remedy = "" if algorithm.traits.totals else ", or algorithm.scale_by_std = true or false"
            yield (
                f"train.mode is {self.train.mode!r}, but algorithm.name = {algorithm.name!r}{adds} divides by a "
                "deviation over the whole batch, so no group can be trained before the last one has finished: set "
                f"train.mode = 'synchronous'{remedy} (see algorithms.md)"
            )

    def _whole_groups_fit_a_micro_batch(self) -> Iterator[str]:
        prompt, response = self.prompts.max_prompt_tokens, self.rollout.max_response_tokens
        longest = prompt + self.rollout.responses_per_prompt * response
        limit = self.trainer.micro_batch_tokens
        if self.algorithm.traits.whole_groups and longest > limit:
            yield (
                f"trainer.micro_batch_tokens is {limit}, but algorithm.name = {self.algorithm.name!r} compares "
                f"rollouts of a whole group in one micro-batch, and a group may have {prompt} "
                f"(prompts.max_prompt_tokens) + {self.rollout.responses_per_prompt} x {response} "
                f"(rollout.responses_per_prompt x max_response_tokens) = {longest} tokens: raise "
                "trainer.micro_batch_tokens, or lower the others"
            )

    def _groups_can_be_compared(self) -> Iterator[str]:
        # An error, not a warning: such a run would use its time without changing the weights.
        compares = not self.algorithm.is_own and not self.algorithm.traits.single_rollouts
        if self.rollout.responses_per_prompt == 1 and compares:
            yield (
                f"rollout.responses_per_prompt is 1, but algorithm.name = {self.algorithm.name!r} compares the "
                "responses of a prompt with each other: the advantage of a single one is 0, and nothing is learned; "
                "set it to 2 or more, 8 for example"
            )

    def _instances_have_a_range(self) -> Iterator[str]:
        if self.cluster.max_instances is not None and self.cluster.max_instances < self.inference.num_instances:
            yield (
                f"cluster.max_instances is {self.cluster.max_instances}, but inference.num_instances, the least, is "
                f"{self.inference.num_instances}: raise the one or lower the other"
            )

    def _nodes_fit_together(self) -> Iterator[str]:
        try:
            assert self.graph.waves
        except ConfigError as error:
            yield str(error)

    def _adapters_find_their_base(self) -> Iterator[str]:
        if self.publishes_adapters and self.run.placement == "turns":
            yield (
                "adapter.publish is 'adapters', but run.placement is 'turns': instances drop the weights below the "
                "adapters each time they sleep; set adapter.publish to 'merged'"
            )
        rank = self.adapter.rank
        if rank is not None and self.publishes_adapters and self.inference.engine == "vllm" and rank > VLLM_RANKS[-1]:
            yield (
                f"adapter.rank is {rank}, and vLLM takes adapters up to rank {VLLM_RANKS[-1]}: lower it, or set "
                "adapter.publish to 'merged'"
            )

    def _settings_have_an_effect(self) -> Iterator[str]:
        for need in (need for need in NEEDS if not need.is_met(self)):
            section = getattr(self, need.section)
            for key, default in ((key, type(section).model_fields[key]) for key in need.keys.split()):
                value = getattr(section, key)
                if value != default.get_default(call_default_factory=True):
                    name = f"{need.section}.{key}"
                    yield f"{name} is {as_toml(value)} and has no effect here: set {need.remedy}, or remove {name}"

    def require_prompts_for(self, num_ranks: int) -> None:
        """Checks that this number of training ranks forms replicas, each with a prompt of every mini-batch.

        Raises:
            ConfigError: they do not.
        """
        num_prompts, num_replicas = self.prompts.prompts_per_batch, self.trainer.num_replicas(num_ranks)
        if num_prompts < num_replicas * self.train.steps_per_batch:
            raise ConfigError(
                f"prompts.prompts_per_batch is {num_prompts}, but there are {num_replicas} replicas x "
                f"{self.train.steps_per_batch} train.steps_per_batch: every replica needs at least one prompt for each "
                "step of each batch"
            )
