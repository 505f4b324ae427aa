"""The parameters of one training rank, and the bytes of a model that it trains; for the forecast of its memory."""

from dataclasses import dataclass
from math import ceil

from async_rl.checks.preflight.adapter_sizes import layer_parameters
from async_rl.config.adapter_section import AdapterSection
from async_rl.config.trainer_section import TrainerSection
from async_rl.shared.model_shape import ModelShape, stage_layers

WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}
WIDE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Shares:
    """How a run's layout divides a model: `num_replicas` replicas; experts over `expert` ranks of a stage; rows over
    `context` ranks that hold the same weights."""

    tensor: int
    pipeline: int
    expert: int
    num_replicas: int
    num_chunks: int = 1
    """Parts of the layers on each rank of a pipeline."""
    context: int = 1

    @classmethod
    def of(cls, trainer: TrainerSection, num_ranks: int) -> "Shares":
        """
        Raises:
            ConfigError: that many ranks do not form replicas.
        """
        replicas = trainer.num_replicas(num_ranks)
        return cls(
            trainer.tensor_parallel,
            trainer.pipeline_parallel,
            trainer.expert_parallel,
            replicas,
            trainer.virtual_pipeline_parallel,
            trainer.context_parallel,
        )

    @property
    def num_groups(self) -> int:
        """Groups of processes on devices that a rank is in: those that share tensors, rows, layers, gradients and
        experts, and that of all ranks."""
        copies = self.num_weight_copies
        all_ranks = self.tensor * self.pipeline * copies
        return sum(size > 1 for size in (self.tensor, self.context, self.pipeline, copies, self.expert, all_ranks))

    @property
    def num_weight_copies(self) -> int:
        """Ranks that hold the same part of a dense layer, and share their optimizer's state."""
        return self.context * self.num_replicas

    @property
    def divides_model(self) -> bool:
        """Whether tensors have to be put together from several ranks."""
        return self.tensor * self.pipeline * self.expert > 1

    @property
    def micro_batches_kept(self) -> float:
        """Micro-batches whose activations the first pipeline stage keeps at most.

        In the interleaved schedule, of p stages with v chunks each, these are p v + p - 1 chunks of 1 / v of a rank's
        layers (arXiv 2104.04473, section 2.2).
        """
        if self.num_chunks == 1:
            return self.pipeline
        return self.pipeline + (self.pipeline - 1) / self.num_chunks

    def layers_of(self, stage: int, num_layers: int) -> list[int]:
        """The layers of a rank of this pipeline stage, all its chunks'."""
        parts = stage_layers(num_layers, self.pipeline * self.num_chunks)
        return [layer for part in parts[stage :: self.pipeline] for layer in part]

    @property
    def num_expert_replicas(self) -> int:
        """Ranks that hold the same experts, and share their optimizer's state."""
        return max(1, self.tensor * self.num_weight_copies // self.expert)


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Parameters of one rank; `largest` is its largest tensor's number of values."""

    dense: int
    experts: int
    largest: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


def rank_parameters(model: ModelShape, shares: Shares) -> RankParameters:
    """The parameters of the rank that has most of them."""
    vocabulary = ceil(model.vocabulary_parameters / shares.tensor)
    # A tied head is a second copy where the last stage is not the first.
    last = model.hidden_size + (model.hidden_size if model.gives_values else vocabulary)
    whole = vocabulary + last - (vocabulary if model.tied else 0)
    ends = {0: vocabulary, shares.pipeline - 1: last} if shares.pipeline > 1 else {0: whole}
    has_dense = not model.has_experts(0)
    largest = max(
        vocabulary,
        ceil(2 * model.hidden_size * model.ffn_size / shares.tensor) if has_dense else 0,
        ceil(model.layer_parameters(model.num_layers - 1).experts * 2 / 3 / shares.expert),
    )
    stages = []
    for number in range(shares.pipeline):
        found = [model.layer_parameters(layer) for layer in shares.layers_of(number, model.num_layers)]
        dense = sum(ceil(each.divided / shares.tensor) + each.whole for each in found) + ends.get(number, 0)
        stages.append(RankParameters(dense, sum(ceil(each.experts / shares.expert) for each in found), largest))
    return max(stages, key=lambda stage: stage.total)


def trained_model_bytes(parameters: RankParameters, shares: Shares, dtype: str) -> dict[str, int]:
    """Weights, gradient sums and optimizer state of a model that is trained, by name.

    AdamW's two moments are float32, and so is a master copy of weights in bfloat16.
    """
    states = WIDE_BYTES * (2 if dtype == "float32" else 3)
    dense_ways, expert_ways = (shares.num_weight_copies, shares.num_expert_replicas)
    return {
        "weights": parameters.total * WEIGHT_BYTES[dtype],
        "gradients": parameters.total * WIDE_BYTES,
        "optimizer": states * (ceil(parameters.dense / dense_ways) + ceil(parameters.experts / expert_ways)),
    }


def adapter_parameters(adapter: AdapterSection, model: ModelShape, shares: Shares) -> int:
    """Of the rank that has most layers."""
    layers = max(map(len, stage_layers(model.num_layers, shares.pipeline)))
    return layers * layer_parameters(adapter, model, shares.tensor)
