"""Checkpoints whose files are changed, and weights in fp8 and MXFP4."""

import json
import shutil
from pathlib import Path

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

BLOCK = (16, 8)
FP8 = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}


def in_fp8(weights: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Matrices of layers in fp8 with scales by block, as DeepSeek-V3's, but no others; and what these are."""
    stored, meant = dict(weights), dict(weights)
    for name, weight in weights.items():
        if name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")):
            sizes = [-(-size // length) for size, length in zip(weight.shape, BLOCK, strict=True)]
            scales = 0.01 + torch.rand(*sizes)
            of_each = scales.repeat_interleave(BLOCK[0], 0)[: len(weight)]
            of_each = of_each.repeat_interleave(BLOCK[1], 1)[:, : weight.shape[1]]
            stored[name] = (weight / of_each).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales
            meant[name] = stored[name].float() * of_each
    return stored, meant


def copied(source: Path, target: Path, **changes: object) -> Path:
    """A copy of a checkpoint with some keys of its config changed."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


def in_mxfp4(weights: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Experts of random bytes, of all four-bit values and of many scales; and what transformers makes of them."""
    stored, meant = dict(weights), dict(weights)
    for name, (num_experts, inputs, outputs) in ((n, w.shape) for n, w in weights.items() if n.endswith("_proj")):
        blocks = torch.randint(256, (num_experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(110, 126, blocks.shape[:-1], dtype=torch.uint8)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return stored, meant
