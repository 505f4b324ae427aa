"""The policy of a checkpoint, or adapters and their base, as a Hugging Face checkpoint; `trainer.export` calls it."""

import json
from pathlib import Path

import torch
import torch.distributed as dist

from async_rl.checks.preflight.adapter import read_saved_section, require_saved_adapters
from async_rl.checks.preflight.model import ModelFiles, find_checkpoint, read_shape
from async_rl.checks.preflight.resume import other_base, shape_changes
from async_rl.checks.preflight.weight_files import weights_sample
from async_rl.config.file import parse_config
from async_rl.config.trainer_section import TrainerSection
from async_rl.errors import ConfigError
from async_rl.shared.protocol.adapter import BASE_DIGEST, BASE_SAMPLE, BASE_SHAPE
from trainer.checkpoint.checkpoint import fill, read_checked
from trainer.checkpoint.tensors import POLICY, model_tensors
from trainer.hf.adapters import add_adapters, require_base, save_adapters, start_adapters, weights_digest
from trainer.hf.checkpoint import save_hf_checkpoint
from trainer.hf.weights import load_hf_weights
from trainer.model.gpt import build_model
from trainer.parallel import Parallel


def export_policy(
    checkpoint: Path, target: Path, parallel: Parallel, model_path: str | None = None, *, merges: bool = False
) -> None:
    """Writes the policy to `target` in the run's `model.dtype`; all other files come from `model_path`, by default the
    run's `model.path`.

    Of a run that trained adapters it writes these, as peft has them, unless it `merges` them into the weights.

    `parallel` is one process; the checkpoint may have any layout.

    Raises:
        ConfigError: the checkpoint is damaged, or the run's model no longer exists.
    """
    content = read_checked(checkpoint, parallel)
    config = parse_config(content["config"], source=f"the config in checkpoint {str(checkpoint)!r}")
    setting = "--model" if model_path else "model.path"
    source = _find_model(model_path or config.model.path, setting)
    shape, contents = read_shape(source), content.get("contents", {})
    faults = shape_changes(contents.get("shape", {}), shape.as_json(), setting)
    of_base: dict[str, str] = {}
    if config.adapter.is_given:
        of_base = {BASE_DIGEST: weights_digest(source), BASE_SAMPLE: weights_sample(source)}
        of_base[BASE_SHAPE] = json.dumps(shape.as_json())
        if (before := contents.get("base")) and before != of_base[BASE_DIGEST]:
            faults.append(other_base(setting, before, of_base[BASE_DIGEST]))
    if faults:
        raise ConfigError(f"checkpoint {str(checkpoint)!r}: {'; '.join(faults)}: name that model by --model")
    model = build_model(shape, getattr(torch, config.model.dtype), parallel, TrainerSection())
    if config.adapter.is_given:
        load_hf_weights(model, source)
        add_adapters(model, config.adapter)
    fill(checkpoint, model_tensors(model, POLICY), parallel, dist.group.WORLD)
    if config.adapter.is_given and not merges:
        save_adapters(model, config.adapter, model_path or config.model.path, target, of_base)
    else:
        save_hf_checkpoint(model, source, target)


def export_merged(adapters: Path, target: Path, parallel: Parallel, base: str | None, dtype: str | None) -> None:
    """Writes adapters that peft has saved in a directory, merged into their base, to `target`, with the base's files.

    Args:
        parallel: one process.
        base: where the base is, by default where the adapters' own config says.
        dtype: of the merged weights, "float32" or "bfloat16"; by default the base's own.

    Raises:
        ConfigError: there is no such base, or the adapters do not fit it.
    """
    section, said = read_saved_section(adapters)
    if not (base or said):
        raise ConfigError(f"{str(adapters)!r} does not say its base (base_model_name_or_path): name it by --model")
    source = _find_model(base or said, "--model" if base else "base_model_name_or_path")
    files = ModelFiles.find(str(source), "the base", is_whole=False)
    require_saved_adapters(section, files)
    require_base(adapters, lambda: weights_digest(source), f"the base {str(source)!r}")
    model = build_model(files.shape, _dtype_of(files, dtype), parallel, TrainerSection())
    load_hf_weights(model, source)
    start_adapters(model, section)
    save_hf_checkpoint(model, source, target)


def _dtype_of(files: ModelFiles, asked: str | None) -> torch.dtype:
    """Of a base that does not say it, or has another one than the trainer computes with, float32."""
    own = files.config.get("dtype") or files.config.get("torch_dtype")
    return torch.bfloat16 if (asked or own) == "bfloat16" else torch.float32


def _find_model(path: str, setting: str) -> Path:
    try:
        return find_checkpoint(path, setting)
    except ConfigError as error:
        if setting == "--model":
            raise
        raise ConfigError(
            f"{error}; if it is a directory that was moved, or relative to where the run was started, say where it is "
            "now: --model"
        ) from error
