"""Ragged segments and inputs for the attention kernels."""

import random

import torch

from trainer.attention.segments import Segments
from trainer.devices.attention_part import Part

CPU = torch.device("cpu")
SHAPES = (
    "one group",
    "several groups",
    "prompt of one token",
    "responses of one row",
    "no response row",
    "micro-group",
)


def make_segments(rng: random.Random, shape: str, device: torch.device) -> Segments:
    """Random lengths of one of `SHAPES`."""
    if shape == "micro-group":
        # Second stage of a long group: keys of the prompt, and of two rows of padding, precede its own keys.
        num_prompt, lens = rng.randint(1, 9), tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 4)))
        cross = Part((sum(lens),), (num_prompt,), False, device)
        return Segments(Part(lens, lens, True, device), cross, self_kv_start=num_prompt + 2)
    num_groups = rng.randint(2, 4) if shape == "several groups" else 1
    longest_prompt, longest_response = (1 if "prompt" in shape else 9), (1 if "one row" in shape else 7)
    prompts = tuple(rng.randint(1, longest_prompt) for _ in range(num_groups))
    if shape == "no response row":
        return Segments(Part(prompts, prompts, True, device), None, cross_q_start=sum(prompts))
    groups = [tuple(rng.randint(1, longest_response) for _ in range(rng.randint(1, 5))) for _ in prompts]
    lens = (*prompts, *(length for group in groups for length in group))
    cross = Part(tuple(map(sum, groups)), prompts, False, device)
    return Segments(Part(lens, lens, True, device), cross, cross_q_start=sum(prompts))


def make_inputs(
    segments: Segments, dtype: torch.dtype, heads: tuple[int, int], head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(query, key, value, dout); key and value are views of one tensor, as in the trainer."""
    num_kv = segments.self_kv_start + segments.num_rows
    query, dout = (torch.randn(segments.num_rows, heads[0], head_dim, dtype=dtype) for _ in range(2))
    key, value = torch.randn(num_kv, heads[1], 2 * head_dim, dtype=dtype).chunk(2, dim=-1)
    return query, key, value, dout
