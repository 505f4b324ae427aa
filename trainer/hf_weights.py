"""Names and shapes of weights, Hugging Face <-> Megatron, and loading a checkpoint tensor by tensor.

Shape legend: V vocabulary, H hidden size, A query heads, K key / value heads, D head dimension, F feed-forward size.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from async_rl.errors import ConfigError
from trainer.hf_config import ModelShape
from trainer.model import SharedPromptGPT

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class Fusion(Protocol):
    """How one Megatron tensor is made of Hugging Face tensors."""

    def merge(self, parts: Sequence[torch.Tensor]) -> torch.Tensor: ...

    def split(self, merged: torch.Tensor) -> list[torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class Stacked:
    """The parts one after the other along dimension 0, in equal shares: gate and up; a single part is itself."""

    num_parts: int = 1

    def merge(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))

    def split(self, merged: torch.Tensor) -> list[torch.Tensor]:
        return list(merged.chunk(self.num_parts))


@dataclass(frozen=True, slots=True)
class GroupedQKV:
    """q, k, v as Megatron keeps them: per key / value head its query heads, then its key, then its value."""

    num_kv_heads: int
    queries_per_kv: int
    head_dim: int

    def merge(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """q [A * D, ...], k and v [K * D, ...] -> [(A + 2 K) * D, ...]."""
        heads = [part.unflatten(0, (self.num_kv_heads, -1, self.head_dim)) for part in parts]
        return torch.cat(heads, dim=1).flatten(0, 2)

    def split(self, merged: torch.Tensor) -> list[torch.Tensor]:
        heads = merged.unflatten(0, (self.num_kv_heads, self.queries_per_kv + 2, self.head_dim))
        return [part.flatten(0, 2) for part in heads.split([self.queries_per_kv, 1, 1], dim=1)]


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """One Megatron parameter and the Hugging Face tensors that it holds, in the order `fusion` takes them."""

    megatron_name: str
    hf_shapes: dict[str, tuple[int, ...]]
    fusion: Fusion


def weight_map(shape: ModelShape) -> Iterator[WeightEntry]:
    """All weights of a model, layer by layer, in the order they are loaded and published; a tied head is left out."""
    plain = Stacked()
    V, H = shape.vocab_size, shape.hidden_size
    yield WeightEntry("embedding.word_embeddings.weight", {"model.embed_tokens.weight": (V, H)}, plain)
    for layer in range(shape.num_layers):
        yield from _layer_map(shape, f"decoder.layers.{layer}.", f"model.layers.{layer}.")
    yield WeightEntry("decoder.final_layernorm.weight", {"model.norm.weight": (H,)}, plain)
    if not shape.tied:
        yield WeightEntry("output_layer.weight", {"lm_head.weight": (V, H)}, plain)


def _layer_map(shape: ModelShape, ours: str, theirs: str) -> Iterator[WeightEntry]:
    plain, H, F, D = Stacked(), shape.hidden_size, shape.ffn_size, shape.head_dim
    q_size, kv_size = shape.num_heads * D, shape.num_kv_heads * D
    qkv = GroupedQKV(shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, D)
    qkv_sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}

    def entry(name: str, fusion: Fusion, **hf_shapes: tuple[int, ...]) -> WeightEntry:
        return WeightEntry(ours + name, {theirs + k.replace("__", "."): s for k, s in hf_shapes.items()}, fusion)

    yield entry("input_layernorm.weight", plain, input_layernorm__weight=(H,))
    for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
        rest = (H,) if kind == "weight" else ()
        hf_shapes = {f"self_attn__{name}__{kind}": (size, *rest) for name, size in qkv_sizes.items()}
        yield entry(f"self_attention.linear_qkv.{kind}", qkv, **hf_shapes)
    if shape.qk_norm:
        yield entry("self_attention.q_layernorm.weight", plain, self_attn__q_norm__weight=(D,))
        yield entry("self_attention.k_layernorm.weight", plain, self_attn__k_norm__weight=(D,))
    yield entry("self_attention.linear_proj.weight", plain, self_attn__o_proj__weight=(H, q_size))
    yield entry("pre_mlp_layernorm.weight", plain, post_attention_layernorm__weight=(H,))
    gate_up = {"mlp__gate_proj__weight": (F, H), "mlp__up_proj__weight": (F, H)}
    yield entry("mlp.linear_fc1.weight", Stacked(2), **gate_up)
    yield entry("mlp.linear_fc2.weight", plain, mlp__down_proj__weight=(H, F))


def load_hf_weights(model: SharedPromptGPT, checkpoint: Path) -> None:
    """Fills the model from the safetensors files of a checkpoint directory, one Megatron tensor at a time.

    Raises:
        ConfigError: a tensor is missing, has another shape, or is not part of the architecture; nothing is half
            loaded then, as names and shapes are compared first.
    """
    parameters = dict(model.named_parameters())
    entries = list(weight_map(model.shape))
    assert {entry.megatron_name for entry in entries} == set(parameters), (
        f"the weight map misses {set(parameters) ^ {entry.megatron_name for entry in entries}}"
    )
    with ExitStack() as stack:
        files = _open_tensors(checkpoint, stack)
        _check_names_and_shapes(checkpoint, entries, files, model.shape.tied)
        with torch.no_grad():
            for entry in entries:
                parts = [files[name].get_tensor(name) for name in entry.hf_shapes]
                parameters[entry.megatron_name].copy_(entry.fusion.merge(parts))


def _open_tensors(checkpoint: Path, stack: ExitStack) -> dict[str, Any]:
    """Tensor name -> the open file that has it; the files stay open as long as `stack`."""
    if (checkpoint / INDEX_FILE).is_file():
        names = sorted(set(json.loads((checkpoint / INDEX_FILE).read_text())["weight_map"].values()))
    else:
        names = [SINGLE_FILE]
    missing = [name for name in names if not (checkpoint / name).is_file()]
    if missing:
        raise ConfigError(f"checkpoint {str(checkpoint)!r} has no {missing[0]}: expected weights as safetensors")
    opened: dict[str, Any] = {}
    for name in names:
        file = stack.enter_context(safe_open(checkpoint / name, framework="pt"))
        opened.update(dict.fromkeys(file.keys(), file))
    return opened


def _check_names_and_shapes(checkpoint: Path, entries: list[WeightEntry], files: dict[str, Any], tied: bool) -> None:
    expected = {name: shape for entry in entries for name, shape in entry.hf_shapes.items()}
    for name, shape in expected.items():
        if name not in files:
            raise ConfigError(f"checkpoint {str(checkpoint)!r} has no tensor {name!r}, which its config asks for")
        found = tuple(files[name].get_slice(name).get_shape())
        if found != shape:
            raise ConfigError(
                f"checkpoint {str(checkpoint)!r}: tensor {name!r} has shape {list(found)}, but its config.json asks "
                f"for {list(shape)}: use the config that belongs to these weights"
            )
    for name in files:
        # Older checkpoints also keep a copy of the tied head, and the rotary frequencies, which follow from the config.
        known = name in expected or (tied and name == "lm_head.weight") or name.endswith("rotary_emb.inv_freq")
        if not known:
            raise ConfigError(
                f"checkpoint {str(checkpoint)!r} has the tensor {name!r}, which the trainer has no place for: "
                "its architecture has a feature that is not supported"
            )
