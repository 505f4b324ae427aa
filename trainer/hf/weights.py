"""Loads a Hugging Face checkpoint into a rank's part of a model, one Megatron tensor at a time."""

import json
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from async_rl.checks.preflight.weight_dtypes import require_dtypes
from async_rl.checks.preflight.weight_files import (
    FP8_SCALES,
    HEAD,
    ROTARY,
    StoredTensor,
    is_predictor,
    require_tied_head,
    stored_tensors,
)
from async_rl.errors import ConfigError
from async_rl.shared.model_limits import fp8_block, is_mxfp4
from async_rl.shared.model_shape import ModelShape
from trainer.hf.mxfp4 import with_mxfp4
from trainer.hf.weight_map import VALUE_HEAD, Layout, WeightEntry, constants, tied_head, weight_map
from trainer.model.adapters import base_parameters
from trainer.model.gpt import RankModel

STACKED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Tensors that have the matrices of all experts of a layer, and what each has of an expert."""


def load_hf_weights(model: RankModel, checkpoint: Path) -> None:
    """Fills this rank's part of the model from the safetensors files of a checkpoint directory.

    Of every tensor only the part that belongs to this rank is read; no rank waits for another. A critic's head that
    the checkpoint does not have stays as it is.

    Raises:
        ConfigError: as `stored_tensors` and `require_dtypes`; or a tensor is missing, has another shape, or is not part
            of the architecture. Nothing is loaded then, as all names and shapes are compared first.
    """
    parallel = model.parallel
    layout = Layout.of(parallel)
    entries = list(weight_map(model.shape, layout))
    head = tied_head(model.shape, layout)
    own = [entry for entry in (*entries, *([head] if head else [])) if entry.is_on(parallel)]
    kept = list(constants(model.shape, layout))
    parameters = base_parameters(model)
    assert {entry.megatron_name for entry in own} == set(parameters), (
        f"the weight map misses {set(parameters) ^ {entry.megatron_name for entry in own}}"
    )
    tensors, config = stored_tensors(checkpoint), json.loads((checkpoint / "config.json").read_text())
    require_dtypes(f"checkpoint {str(checkpoint)!r}", config, tensors)
    with ExitStack() as stack:
        files = _open_tensors(tensors, stack)
        if is_mxfp4(config):
            files = with_mxfp4(files)
        files = _by_expert(files, {name for entry in entries for name in entry.hf_shapes})
        if model.shape.gives_values and VALUE_HEAD not in files:
            entries, own = ([entry for entry in some if VALUE_HEAD not in entry.hf_shapes] for some in (entries, own))
        ignores_head = model.shape.tied or model.shape.gives_values
        _check_names_and_shapes(checkpoint, [*entries, *kept], files, model.shape, ignores_head=ignores_head)
        block = fp8_block(config)
        if model.shape.tied and HEAD in files:
            require_tied_head(f"checkpoint {str(checkpoint)!r}", tensors)
        with torch.no_grad():
            for entry in (entry.on(parallel.tp_rank) for entry in own):
                shards = entry.shards(*entry.share_of(parallel))
                parts = [
                    shard.of(partial(read_part, files, name, block))
                    for name, shard in zip(entry.hf_shapes, shards, strict=True)
                ]
                merged, parameter = entry.fusion.merge(parts), entry.of(parameters)
                assert merged.shape == parameter.shape, f"{entry.megatron_name}: {merged.shape} != {parameter.shape}"
                parameter.copy_(merged)
            buffers = dict(model.named_buffers())
            for entry in kept:
                if entry.is_on(parallel):
                    (name,) = entry.hf_shapes
                    buffers[entry.megatron_name].copy_(files[name].get_tensor(name))


def read_part(files: dict[str, Any], name: str, block: tuple[int, int] | None, at: tuple[slice, ...]) -> torch.Tensor:
    """A part of a stored tensor; of one in fp8 the values, each times the scale of its `block` of rows and columns."""
    stored = files[name].get_slice(name)
    part: torch.Tensor = stored[at]
    if block is None or name + FP8_SCALES not in files:
        return part
    scales = files[name + FP8_SCALES].get_tensor(name + FP8_SCALES).float()
    rows, columns = (
        torch.arange(size)[own] // length for size, own, length in zip(stored.get_shape(), at, block, strict=True)
    )
    values: torch.Tensor = part.float() * scales[rows][:, columns]
    return values


def _open_tensors(tensors: Mapping[str, StoredTensor], stack: ExitStack) -> dict[str, Any]:
    """Tensor name -> the open file that contains it; the files stay open as long as `stack`."""
    opened: dict[Path, Any] = {}
    for path in {tensor.file for tensor in tensors.values()}:
        try:
            opened[path] = stack.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise ConfigError(f"{str(path)!r} cannot be read as safetensors ({error}): download it again") from error
    return {name: opened[tensor.file] for name, tensor in tensors.items()}


@dataclass(frozen=True, slots=True)
class _OneExpert:
    """An expert's matrix in a tensor with those of all experts, [experts, rows, columns], as transformers has them in
    memory, and saves them without `save_original_format`: what an open file has of a tensor."""

    stored: Any
    expert: int
    rows: range

    def get_slice(self, name: str) -> "_OneExpert":
        return self

    def get_shape(self) -> list[int]:
        return [len(self.rows), self.stored.get_shape()[2]]

    def __getitem__(self, at: tuple[slice, slice]) -> torch.Tensor:
        rows = self.rows[at[0]]
        part: torch.Tensor = self.stored[self.expert : self.expert + 1, rows.start : rows.stop, at[1]]
        return part[0]


def _by_expert(opened: dict[str, Any], expected: Collection[str]) -> dict[str, Any]:
    """Each expert under a name of its own, as most checkpoints have them; `expected` tensors as they are."""
    found: dict[str, Any] = {}
    for name, file in opened.items():
        layer, _, kind = name.partition(".experts.")
        parts = () if name in expected else STACKED_EXPERTS.get(kind, ())
        shape = file.get_slice(name).get_shape() if parts else []
        if len(shape) != 3:
            found[name] = file
            continue
        size = shape[1] // len(parts)
        for expert, (i, part) in product(range(shape[0]), enumerate(parts)):
            one = _OneExpert(file.get_slice(name), expert, range(i * size, (i + 1) * size))
            found[f"{layer}.experts.{expert}.{part}.weight"] = one
    return found


def _check_names_and_shapes(
    checkpoint: Path, entries: list[WeightEntry], files: dict[str, Any], shape: ModelShape, *, ignores_head: bool
) -> None:
    expected = {name: shape for entry in entries for name, shape in entry.hf_shapes.items()}
    for name, size in expected.items():
        if name not in files:
            raise ConfigError(f"checkpoint {str(checkpoint)!r} has no tensor {name!r}, which its config asks for")
        found = tuple(files[name].get_slice(name).get_shape())
        if found != size:
            raise ConfigError(
                f"checkpoint {str(checkpoint)!r}: tensor {name!r} has shape {list(found)}, but its config.json asks "
                f"for {list(size)}: use the config that belongs to these weights"
            )
    for name in files:
        # Older checkpoints may also contain a copy of the tied head, and rotary frequencies, which the config
        # determines.
        known = name.removesuffix(FP8_SCALES) in expected or (ignores_head and name == HEAD)
        if not (known or name.endswith(ROTARY) or is_predictor(name, shape, files)):
            raise ConfigError(
                f"checkpoint {str(checkpoint)!r} has the tensor {name!r}, which the trainer has no place for: "
                "its architecture has a feature that is not supported"
            )
