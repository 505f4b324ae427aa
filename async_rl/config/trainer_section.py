"""The `[trainer]` section: devices and layout of the training pool."""

from typing import Literal

from pydantic import Field

from async_rl.config.section import Section
from async_rl.errors import ConfigError


class TrainerSection(Section):
    device: Literal["cpu", "cuda", "npu"] = Field("cpu", description="where the trainer runs")
    num_processes: int | None = Field(
        None, ge=1, description="training ranks that `async-rl run` starts on this host; by default one replica's"
    )
    tensor_parallel: int = Field(
        1, ge=1, description="ranks that share every layer's tensors, and its rows (sequence parallelism)"
    )
    context_parallel: int = Field(
        1,
        ge=1,
        description="ranks that share the rows of every layer, and the heads of its attention: for long contexts",
    )
    pipeline_parallel: int = Field(1, ge=1, description="ranks that share the layers")
    virtual_pipeline_parallel: int = Field(
        1,
        ge=1,
        description="parts of the layers on each rank of a pipeline; above 1 its schedule is the interleaved one",
    )
    expert_parallel: int = Field(
        1, ge=1, description="ranks of a pipeline stage that share the experts, across replicas if need be"
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="activations computed again in backward: none, feed-forward parts, or whole layers"
    )
    micro_batch_tokens: int = Field(
        4096, ge=1, description="rows of one micro-batch at most; a longer group is split in micro-groups"
    )
    frozen_weights: Literal["device", "host"] = Field(
        "device", description="where old and reference weights wait until they are used"
    )
    lost_after_s: float = Field(
        30.0,
        ge=2.0,
        description="a training rank that is silent for so long counts as lost, and ends the others; the producer "
        "is replaced then; a process that a signal stops is killed by its launcher 30 s later, and a sole rank whose "
        "device hangs ends after 30 times as long",
    )

    @property
    def ranks_per_replica(self) -> int:
        return self.tensor_parallel * self.context_parallel * self.pipeline_parallel

    @property
    def num_senders(self) -> int:
        """Of weights with the transport "stages", at most: a stage without experts, or whose experts are one tensor,
        has one."""
        return self.pipeline_parallel * (1 + max(0, self.expert_parallel - self.tensor_parallel))

    @property
    def num_local_ranks(self) -> int:
        """Training ranks of `async-rl run`."""
        return self.num_processes or self.ranks_per_replica

    @property
    def trains_backlogs(self) -> bool:
        """Whether a window has a cost of its own, and so is everything that is ready: a pipeline's ranks idle while it
        fills and drains, and frozen weights are copied from the host."""
        return self.pipeline_parallel > 1 or self.frozen_weights == "host"

    def num_replicas(self, num_ranks: int) -> int:
        """How many replicas this number of training ranks forms.

        Raises:
            ConfigError: they cannot be arranged as this section requires.
        """
        if num_ranks % self.ranks_per_replica:
            raise ConfigError(
                f"{num_ranks} training ranks (trainer.num_processes) cannot form replicas of trainer.tensor_parallel x "
                f"context_parallel x pipeline_parallel = {self.tensor_parallel} x {self.context_parallel} x "
                f"{self.pipeline_parallel} = {self.ranks_per_replica} ranks: start a multiple of it"
            )
        if self.virtual_pipeline_parallel > 1 and self.pipeline_parallel == 1:
            raise ConfigError(
                f"trainer.virtual_pipeline_parallel is {self.virtual_pipeline_parallel}, but trainer.pipeline_parallel "
                "is 1: ranks of a pipeline take turns with their parts; leave it at 1, or set more stages"
            )
        ranks_per_stage = num_ranks // self.pipeline_parallel
        if ranks_per_stage % self.expert_parallel:
            raise ConfigError(
                f"trainer.expert_parallel = {self.expert_parallel} does not divide the {ranks_per_stage} ranks of a "
                "pipeline stage, which share its experts: choose a divisor"
            )
        return num_ranks // self.ranks_per_replica
