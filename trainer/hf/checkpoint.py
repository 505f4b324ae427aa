"""Saves the policy as a Hugging Face checkpoint directory that transformers and vLLM load."""

import json
import logging
import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from async_rl.checks.preflight.model import CHECKPOINT_FILES
from async_rl.checks.preflight.weight_files import INDEX_FILE, SINGLE_FILE, stored_tensors
from async_rl.shared.files import replace_directory, write_failed
from async_rl.shared.weights.messages import buckets
from trainer.hf.weight_export import WeightExport
from trainer.hf.weight_map import constants
from trainer.model.adapters import rounded_away
from trainer.model.gpt import RankModel

log = logging.getLogger(__name__)

PREDICTORS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")

MAX_SHARD_BYTES = 4 * 2**30


def save_hf_checkpoint(model: RankModel, source: Path, path: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Writes weights, config, tokenizer and generation config to the directory `path`, replacing what is there.

    Every rank calls it and contributes its part of the weights; only the main rank writes, and the other ranks do not
    wait until its files are complete.

    All other files come from the `source` checkpoint, the one that was loaded. `path` appears only when it is complete;
    until then the files are in `path` + ".partial" beside it, which is removed if it cannot be completed.

    Raises:
        WriteFailed: a file cannot be written.
    """
    export = WeightExport(model)
    if not model.parallel.is_main:
        export.serve()
        return
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _write_files(export, source, partial, max_shard_bytes)
        replace_directory(partial, path)
        _warn_of_rounding(model, path)
    # safetensors wraps the system's error in its own.
    except (OSError, SafetensorError) as error:
        raise write_failed(path, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _warn_of_rounding(model: RankModel, path: Path) -> None:
    lost, updated = rounded_away(model)
    if lost:
        log.warning(
            "%s: of %d matrices whose adapters have an update %d are those of the base, bit for bit, after rounding to "
            "model.dtype; async-rl export without --merge writes the adapters themselves",
            path,
            updated,
            lost,
        )


def _write_files(export: WeightExport, source: Path, directory: Path, max_shard_bytes: int) -> None:
    """Everything of a checkpoint, into a new directory."""
    directory.mkdir(parents=True)
    for pattern in CHECKPOINT_FILES:
        for file in source.glob(pattern):
            if not file.name.endswith((".safetensors", INDEX_FILE)):
                target = directory / file.relative_to(source)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)
    dtype_name = _save_weights(export, _constants(export, source), directory, max_shard_bytes)
    config = json.loads((directory / "config.json").read_text())
    for key in ("torch_dtype", "quantization_config"):
        config.pop(key, None)
    # Layers for multi-token prediction were not loaded.
    config |= {key: 0 for key in PREDICTORS if config.get(key)}
    (directory / "config.json").write_text(json.dumps({**config, "dtype": dtype_name}, indent=2) + "\n")


def _constants(export: WeightExport, source: Path) -> dict[str, torch.Tensor]:
    """What training does not change, which is not in the stream of weights."""
    names = {name for entry in constants(export.shape) for name in entry.hf_shapes}
    stored = stored_tensors(source) if names else {}
    found: dict[str, torch.Tensor] = {}
    for name in sorted(names):
        with safe_open(stored[name].file, framework="pt") as opened:
            found[name] = opened.get_tensor(name)
    return found


def _save_weights(export: WeightExport, kept: dict[str, torch.Tensor], directory: Path, max_shard_bytes: int) -> str:
    """Writes one safetensors file, or several and their index, with those of `kept` in the first; at most one shard is
    copied at a time."""
    specs = export.specs
    shards = list(buckets(specs, max_shard_bytes))
    files: dict[str, str] = {}
    with closing(export.stream()) as stream:
        for number, shard in enumerate(shards, start=1):
            file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            tensors = kept if number == 1 else {}
            files |= dict.fromkeys(tensors, file)
            for _ in shard:
                spec, tensor = next(stream)
                # safetensors refuses tensors that share memory, such as parts of one fused parameter.
                tensors[spec.name] = tensor.cpu().clone(memory_format=torch.contiguous_format)
                files[spec.name] = file
            save_tensors(tensors, directory / file, {"format": "pt"})
    if len(shards) > 1:
        size = sum(spec.num_bytes for spec in specs) + sum(tensor.nbytes for tensor in kept.values())
        index = {"metadata": {"total_size": size}, "weight_map": files}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    return specs[0].dtype_name


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file with the mode of any new file: safetensors lets its owner read it, and nobody else."""
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata=dict(metadata))
    path.chmod(mode)
