"""The size of a model in terms of the FLOPs that it takes, for the estimate of MFU; for `trainer.trainer`."""

import torch

from async_rl.model_shape import ModelShape
from async_rl.tracking.throughput import ModelSize, TrainingPool
from trainer.devices.peak_flops import peak_flops_of
from trainer.parallel import Parallel


def training_pool(shape: ModelShape | None, dtype: torch.dtype, parallel: Parallel, num_frozen: int) -> TrainingPool:
    """What throughput per device depends on; `shape` is None where not all models have the policy's."""
    return TrainingPool(
        num_devices=parallel.num_ranks,
        model=model_size(shape) if shape is not None else None,
        num_frozen=num_frozen,
        peak_flops=peak_flops_of(parallel.device.DEVICE, dtype),
    )


def model_size(shape: ModelShape) -> ModelSize:
    """Weights of matrix products only: norms, biases and the look-up of embeddings take next to no FLOPs."""
    hidden, head_dim = shape.hidden_size, shape.head_dim
    attention = hidden * head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    ffn = 3 * hidden * shape.ffn_size
    if (experts := shape.experts) is not None:
        ffn = hidden * (experts.num_experts + 3 * experts.top_k * experts.ffn_size)
    return ModelSize(
        num_layer_parameters=shape.num_layers * (attention + ffn),
        num_output_parameters=hidden * shape.vocab_size,
        attention_width=shape.num_layers * shape.num_heads * head_dim,
    )
