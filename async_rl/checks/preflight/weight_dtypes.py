"""Whether a checkpoint's numbers are read as what they stand for: dtypes and scales, by headers; without torch.

For `check` and for the trainer's loader, which reads fp8 and MXFP4.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from async_rl.checks.preflight.weight_files import FP8_SCALES, MXFP4_BLOCKS, MXFP4_SCALES, StoredTensor
from async_rl.errors import ConfigError
from async_rl.shared.model_limits import fp8_block, is_mxfp4

FLOATS = ("BF16", "F16", "F32", "F64")

FP8, MXFP4_DTYPE = "F8_E4M3", "U8"

MXFP4_GROUP = 32
"""Inputs that share a scale: blocks are [E, O, G, 16], two values in a byte, and scales [E, O, G], of E experts, O
outputs and G groups."""


def require_dtypes(named: str, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
    """Checks that all tensors are floating-point numbers, or quantized as config.json says, with their scales.

    Raises:
        ConfigError: one is not.
    """
    for fault in _faults(config, tensors):
        raise ConfigError(f"{named} has {fault}; download it again, or name the checkpoint in bfloat16")


def _faults(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    block, in_mxfp4 = fp8_block(config), is_mxfp4(config)
    for name, tensor in tensors.items():
        scaled = tensors.get(name.removesuffix(FP8_SCALES))
        if tensor.dtype == FP8:
            yield from _faults_of_fp8(name, tensor, tensors.get(name + FP8_SCALES), block)
        elif name.endswith(FP8_SCALES) and (scaled is None or scaled.dtype != FP8):
            yield f"{name!r}, which are scales, but {'no' if scaled is None else scaled.dtype} values: expected {FP8}"
        elif in_mxfp4 and name.endswith((MXFP4_BLOCKS, MXFP4_SCALES)):
            yield from _faults_of_mxfp4(name.removesuffix(MXFP4_BLOCKS).removesuffix(MXFP4_SCALES), tensors)
        elif tensor.dtype not in FLOATS:
            yield f"{name!r} in {tensor.dtype}, which the trainer does not read: expected one of {', '.join(FLOATS)}"


def _faults_of_fp8(
    name: str, tensor: StoredTensor, scales: StoredTensor | None, block: tuple[int, int] | None
) -> Iterator[str]:
    if block is None:
        yield f"{name!r} in {FP8}, but no quantization_config of fp8 with a weight_block_size in its config.json"
    elif len(tensor.shape) != len(block):
        yield f"{name!r} of shape {list(tensor.shape)} in {FP8}: expected rows and columns, which blocks divide"
    elif scales is None:
        yield f"{name!r} in {FP8}, but not its scales, {name + FP8_SCALES!r}"
    elif scales.shape != (size := tuple(-(-all_ // own) for all_, own in zip(tensor.shape, block, strict=True))):
        yield (
            f"{name + FP8_SCALES!r} of shape {list(scales.shape)}: expected {list(size)}, a scale for each block of "
            f"{list(block)} (weight_block_size of its config.json) of {list(tensor.shape)}"
        )


def _faults_of_mxfp4(weight: str, tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    blocks, scales = (tensors.get(weight + end) for end in (MXFP4_BLOCKS, MXFP4_SCALES))
    if blocks is None or scales is None:
        has, lacks = (MXFP4_BLOCKS, MXFP4_SCALES) if scales is None else (MXFP4_SCALES, MXFP4_BLOCKS)
        yield f"{weight + has!r}, but no {weight + lacks!r}"
    elif (blocks.dtype, scales.dtype) != (MXFP4_DTYPE, MXFP4_DTYPE):
        yield f"{weight + MXFP4_BLOCKS!r} in {blocks.dtype} and scales in {scales.dtype}: expected {MXFP4_DTYPE}"
    elif len(scales.shape) != 3 or blocks.shape != (*scales.shape, MXFP4_GROUP // 2):
        yield (
            f"{weight + MXFP4_BLOCKS!r} of shape {list(blocks.shape)} and scales of {list(scales.shape)}: expected "
            f"[experts, outputs, groups, {MXFP4_GROUP // 2}] and the first three of them"
        )
