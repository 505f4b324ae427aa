"""Tensors in MXFP4, as checkpoints of gpt-oss have their experts' weights; `weights.py` reads them.

32 neighbouring values of one output share a scale of 2 ^ (byte - 127); each is a 4-bit float with two bits of exponent
and one of mantissa, two of them in a byte, the first in its lower half (OCP Microscaling Formats 1.0, sections 5.2 and
6). What they stand for has three significant bits at most, and is exact in bfloat16.

Shape legend: E experts, I inputs, O outputs, G = I / 32 groups of values that share a scale.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from async_rl.checks.preflight.weight_dtypes import MXFP4_GROUP
from async_rl.checks.preflight.weight_files import MXFP4_BLOCKS, MXFP4_SCALES

EXPONENT_OFFSET = 127
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES))
"""By the four bits of each; the highest is the sign."""


@dataclass(frozen=True, slots=True)
class Mxfp4Slice:
    """The weight [E, I, O] of blocks and scales, in bfloat16, as safetensors gives slices of a tensor."""

    blocks: Any
    scales: Any

    def get_shape(self) -> list[int]:
        num_experts, outputs, groups, _ = self.blocks.get_shape()
        return [num_experts, groups * MXFP4_GROUP, outputs]

    def __getitem__(self, at: tuple[slice, ...]) -> torch.Tensor:
        """The part; one expert after the other is dequantized."""
        experts, inputs, outputs = at
        numbers = range(*experts.indices(self.get_shape()[0]))
        return torch.cat([self._of_expert(slice(number, number + 1), outputs)[:, inputs] for number in numbers])

    def _of_expert(self, expert: slice, outputs: slice) -> torch.Tensor:
        """[1, I, outputs]"""
        blocks, scales = self.blocks[expert, outputs], self.scales[expert, outputs]
        halves = torch.stack([blocks & 0x0F, blocks >> 4], -1).flatten(-2)
        values = torch.ldexp(torch.tensor(VALUES)[halves.int()], scales[..., None].int() - EXPONENT_OFFSET)
        return values.to(torch.bfloat16).flatten(2).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Mxfp4File:
    """The file of one weight, as `safetensors.safe_open` gives it."""

    blocks: Any
    scales: Any

    def get_slice(self, name: str) -> Mxfp4Slice:
        return Mxfp4Slice(self.blocks.get_slice(name + MXFP4_BLOCKS), self.scales.get_slice(name + MXFP4_SCALES))


def with_mxfp4(files: Mapping[str, Any]) -> dict[str, Any]:
    """Tensor name -> open file, where each weight in MXFP4 has its own name in place of those of blocks and scales,
    which belong together (`preflight.weight_dtypes`)."""
    found = dict(files)
    for weight in [name.removesuffix(MXFP4_BLOCKS) for name in files if name.endswith(MXFP4_BLOCKS)]:
        found[weight] = Mxfp4File(found.pop(weight + MXFP4_BLOCKS), found.pop(weight + MXFP4_SCALES))
    return found
