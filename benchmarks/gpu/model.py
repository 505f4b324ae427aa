"""The models of the GPU benchmark, the cost of a micro-batch, and the peak speed of devices."""

from collections.abc import Sequence
from pathlib import Path

import torch

from async_rl.shared.model_shape import ModelShape
from benchmarks.common.random_model import save_random_qwen3
from trainer.batching.shared_prompt import MicroBatch

SIZES = {
    "tiny": ModelShape(
        family="qwen3",
        num_layers=2,
        hidden_size=64,
        ffn_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=512,
        norm_eps=1e-6,
        rope_theta=1e6,
        rope=None,
        tied=True,
    ),
    # Qwen3-0.6B's config.json.
    "0.6b": ModelShape(
        family="qwen3",
        num_layers=28,
        hidden_size=1024,
        ffn_size=3072,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151936,
        norm_eps=1e-6,
        rope_theta=1e6,
        rope=None,
        tied=True,
    ),
}

PASSES = 3
"""Forward, and a backward with two products for each product of the forward."""


def make_checkpoint(path: Path, shape: ModelShape) -> None:
    """Writes a Hugging Face checkpoint of a Qwen3 shape to the directory `path`: random weights in bf16, norms at 1."""
    save_random_qwen3(
        path,
        dtype=torch.bfloat16,
        num_hidden_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tied,
    )


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def model_flops(shape: ModelShape, micro_batches: Sequence[MicroBatch]) -> float:
    """Floating-point operations of the matrix products in forward and backward, recomputation left out.

    Two per multiply-add. Rows go through the projections, rows with logits through the output layer, and each pair of a
    query and a key that it attends to through two products of the head dimension.
    """
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    per_row = 2 * shape.hidden_size * (2 * q_size + 2 * kv_size + 3 * shape.ffn_size)
    total = 0.0
    for micro_batch in micro_batches:
        rows = micro_batch.rows.segments.num_rows
        total += shape.num_layers * (rows * per_row + 4 * q_size * num_pairs(micro_batch))
        total += len(micro_batch.labels.logit_rows_R) * 2 * shape.hidden_size * shape.vocab_size
    return PASSES * total


def num_pairs(micro_batch: MicroBatch) -> int:
    """Pairs of a query and a key that it attends to."""
    segments = micro_batch.rows.segments
    pairs = sum(length * (length + 1) // 2 for length in segments.self_part.q_lens)
    if segments.cross_part is not None:
        lens = zip(segments.cross_part.q_lens, segments.cross_part.kv_lens, strict=True)
        pairs += sum(q * kv for q, kv in lens)
    return pairs
