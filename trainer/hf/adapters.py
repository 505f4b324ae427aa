"""Adapters as peft has them: a directory with adapter_config.json and adapter_model.safetensors."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from async_rl.checks.preflight.weight_files import metadata_of, stored_tensors
from async_rl.config.adapter_section import AdapterSection
from async_rl.errors import ConfigError
from async_rl.shared.files import replace_directory, write_failed
from async_rl.shared.protocol.adapter import BASE_DIGEST, CONFIG_FILE, PREFIX, WEIGHTS_FILE
from trainer.hf.checkpoint import save_tensors
from trainer.hf.fusions import SlicedQKV
from trainer.hf.weight_map import COLUMNS, Layout, WeightEntry, weight_map
from trainer.model.adapters import Adapter, Matrix, adapters_of, add_output
from trainer.model.gpt import RankModel


def weights_digest(directory: Path) -> str:
    """xxh3-128 of names, dtypes, shapes and bytes of all tensors of a checkpoint, in whatever files; all are read.

    Raises as `stored_tensors`.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(stored_tensors(directory).items()):
        digest.update(f"{name}|{tensor.dtype}|{tensor.shape}|".encode())
        for piece in tensor.pieces():
            digest.update(piece)
    return str(digest.hexdigest())


def require_base(directory: Path, digest: Callable[[], str], named: str) -> None:
    """Checks that saved adapters are put beside the weights that they were trained beside, as far as their file says.

    Args:
        digest: of the weights, which are read for it.
        named: the setting that names the weights.

    Raises:
        ConfigError: they are others, or the file cannot be read.
    """
    before = metadata_of(directory / WEIGHTS_FILE).get(BASE_DIGEST)
    if before and before != (now := digest()):
        raise ConfigError(
            f"the adapters in {str(directory)!r} were trained beside weights with the digest {before}, and those of "
            f"{named} have {now}: name the base that they belong to ({CONFIG_FILE} says where it was)"
        )


def add_adapters(model: RankModel, section: AdapterSection) -> None:
    """Gives the targeted layers new adapters, which change nothing yet, and freezes all else but a critic's head.

    A is uniform as in peft (Kaiming's with a = sqrt 5), the same under any layout; B is 0.
    """
    parallel = model.parallel
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(model.shape.gives_values and name.endswith("output_layer.weight"))
    for entry in weight_map(model.shape, Layout.of(parallel)):
        if not entry.is_on(parallel) or not has_adapter(entry, section):
            continue
        assert not isinstance(entry.fusion, SlicedQKV), "ranks that share a key / value head have no adapters"
        shards = [shard.slices for shard in entry.shards(*entry.share_of(parallel))]
        matrices = [
            Matrix(name.removesuffix(".weight"), (shape[0], shape[1]), rows, columns, section.targets_layer(name))
            for (name, shape), ((rows, columns),) in zip(entry.hf_shapes.items(), shards, strict=True)
        ]
        adapter = Adapter(
            matrices,
            entry.fusion.merge,
            section,
            by_columns=entry.divided == COLUMNS,
            shares_rows=parallel.tp_size > 1,
        )
        layer = model.get_submodule(entry.megatron_name.removesuffix(".weight"))
        layer.add_module("adapter", adapter.to(parallel.device.DEVICE))
        layer.register_forward_hook(add_output)


def start_adapters(model: RankModel, section: AdapterSection) -> None:
    """Gives a model adapters: new ones, or this rank's parts of those in `section.path`.

    `require_adapters` has compared the file's names and shapes with the model.

    Raises:
        ConfigError: it cannot be read.
    """
    add_adapters(model, section)
    if section.path is None:
        return
    path = section.path / WEIGHTS_FILE
    try:
        with safe_open(path, framework="pt") as file, torch.no_grad():
            for adapter in adapters_of(model).values():
                for factor, name, at in _placed(adapter):
                    factor.copy_(file.get_slice(name)[at])
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"adapter.path: {str(path)!r} cannot be read: {error}") from error


def has_adapter(entry: WeightEntry, section: AdapterSection) -> bool:
    """Whether a weight is that of a targeted linear layer; of a matrix that holds several, one of them is enough."""
    is_linear = entry.divided is not None and entry.index is None and ".layers." in entry.megatron_name
    return is_linear and entry.megatron_name.endswith(".weight") and any(map(section.targets_layer, entry.hf_shapes))


def save_adapters(
    model: RankModel, section: AdapterSection, base: str, path: Path, of_base: Mapping[str, str] | None = None
) -> None:
    """Writes the adapters of a whole model, on one rank, to the directory `path`, as peft and vLLM load them.

    Args:
        base: the model that they belong to, by its path or name on the hub.
        of_base: digests of that model's weights by `BASE_DIGEST` and `BASE_SAMPLE`, where they are known.

    Raises:
        WriteFailed: a file cannot be written.
    """
    assert model.parallel.num_ranks == 1, "adapters are saved by one rank"
    placed = [each for adapter in adapters_of(model).values() for each in _placed(adapter)]
    tensors = {name: factor.detach().cpu().contiguous() for factor, name, _ in placed}
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": section.rank,
        "lora_alpha": section.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name for adapter in adapters_of(model).values() for name in adapter.a}),
        "inference_mode": True,
    }
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        save_tensors(tensors, partial / WEIGHTS_FILE, {"format": "pt", **(of_base or {})})
        (partial / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n")
        replace_directory(partial, path)
    except (OSError, SafetensorError) as error:
        raise write_failed(path, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


Placed = tuple[torch.Tensor, str, tuple[slice, ...]]


def _placed(adapter: Adapter) -> list[Placed]:
    """(A factor's part of this rank, its name in peft's file, where the part is in the whole)."""
    found: list[Placed] = []
    for factor in adapter.parameters():
        key, _, offset = adapter.whole[id(factor)]
        at = tuple(slice(start, start + size) for start, size in zip(offset, factor.shape, strict=True))
        found.append((factor, f"{PREFIX}{key}.weight", at))
    return found
