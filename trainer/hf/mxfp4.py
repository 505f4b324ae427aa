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

from async_rl.errors import ConfigError

BLOCKS, SCALES = "_blocks", "_scales"
"""What follows the name of a weight in those of its values, uint8 [E, O, G, 16], and of their scales, uint8 [E, O, G].
"""

GROUP = 32
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
        return [num_experts, groups * GROUP, outputs]

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
        return Mxfp4Slice(self.blocks.get_slice(name + BLOCKS), self.scales.get_slice(name + SCALES))


def with_mxfp4(files: Mapping[str, Any], named: str) -> dict[str, Any]:
    """Tensor name -> open file, where each weight in MXFP4 has its own name in place of those of blocks and scales.

    Args:
        named: the checkpoint in messages.

    Raises:
        ConfigError: blocks and scales do not belong together.
    """
    found = dict(files)
    for name in [name for name in files if name.endswith(BLOCKS)]:
        weight = name.removesuffix(BLOCKS)
        blocks, scales = found.pop(name), found.pop(weight + SCALES, None)
        shapes = [
            tuple(file.get_slice(weight + end).get_shape())
            for file, end in ((blocks, BLOCKS), (scales, SCALES))
            if file is not None
        ]
        of_scales, per_group = shapes[0][:-1], GROUP // 2
        if shapes != [(*of_scales, per_group), of_scales] or len(of_scales) != 3:
            raise ConfigError(
                f"{named} has {name!r} of shape {list(shapes[0])} and scales of {list(map(list, shapes[1:]))}: "
                f"expected [experts, outputs, groups, {per_group}] and one of the first three; download it again"
            )
        found[weight] = Mxfp4File(blocks, scales)
    return found
