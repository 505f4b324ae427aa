"""Whether the adapters that a config asks for fit its model, and those that it starts from; without torch."""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from async_rl.checks.preflight.adapter_sizes import ATTENTION, linear_sizes, targeted
from async_rl.checks.preflight.model import CRITIC, ModelFiles
from async_rl.checks.preflight.resume import shape_changes
from async_rl.checks.preflight.weight_files import FLOATS, LAYERS, metadata_of, tensors_of, weights_sample
from async_rl.config.adapter_section import ALL_LINEAR, MAX_LORA_RANK, AdapterSection, Target
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.shared.checkpoint_names import checkpoints_dir, newest_checkpoint
from async_rl.shared.model_shape import ModelShape
from async_rl.shared.protocol.adapter import BASE_SAMPLE, BASE_SHAPE, CONFIG_FILE, WEIGHTS_FILE, A, B, factor_name

PROPOSED_RANK = 16
"""Of adapters that `init` and `check` propose: that of `quickstart smollm2 --lora`."""

UNHELD = {
    "bias": "none",
    "fan_in_fan_out": False,
    "use_rslora": False,
    "use_dora": False,
    "use_qalora": False,
    "use_bdlora": None,
    "lora_bias": False,
    "layer_replication": None,
    "arrow_config": None,
    "kasa_config": None,
    "velora_config": None,
    "monteclora_config": None,
    "alora_invocation_tokens": None,
    "modules_to_save": None,
    "exclude_modules": None,
    "layers_to_transform": None,
    "target_parameters": None,
    "trainable_token_indices": None,
}
"""Keys of adapter_config.json that change what an adapter computes, with the only value that is held."""

BASE_AS_IT_IS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` with which peft leaves the weights below adapters alone; with others, such as "pissa",
it takes from them what the new adapters begin with, whenever it loads them."""

OF_THE_BASE = ("--model", "--dtype", "--quantization")
"""Of vLLM's options, those that give its workers other weights than the trainer's."""

IN_PEFT = {"rank": "r", "alpha": "lora_alpha", "targets": "target_modules"}
"""Key of `[adapter]` -> that of adapter_config.json."""

PATTERNS = ("rank_pattern", "alpha_pattern")
"""Keys whose patterns give some layers another rank or alpha; peft writes patterns that match no layer, too."""
PLAIN = re.compile(r"(\^?\.\*)?[\w.^$\\-]{1,500}")
"""What names of layers have as patterns: another one may take for ever to match."""


def require_adapters(config: Config, files: ModelFiles) -> None:
    """Checks the `[adapter]` section against the model and the critic, the directory that it names, and what vLLM is
    started with.

    Raises:
        ConfigError: they do not fit; names the key, its value and the remedy.
    """
    adapter = config.adapter
    if not adapter.is_given:
        return
    critic = config.algorithm.critic.critic_path
    for model in (files, *([] if critic is None else [ModelFiles.find(critic, CRITIC, is_whole=False)])):
        for fault in _faults_of_model(adapter, model.shape, model.named, config.trainer.tensor_parallel):
            raise ConfigError(fault)
    if (path := first_adapters(config)) is not None:
        for fault in chain(_faults_of_path(adapter, files.shape, path), _faults_of_base(path, files)):
            raise ConfigError(f"{str(path)!r} (adapter.path) {fault}")
    if config.starts_vllm_for_adapters:
        for fault in _faults_of_vllm(config):
            raise ConfigError(fault)


def proposed_adapters(shape: ModelShape, tensor_parallel: int) -> AdapterSection | None:
    """Those to train in place of all weights, where these do not fit; None for a model that cannot have any."""
    targets: tuple[Target, ...] = (ALL_LINEAR,) if shape.experts is None else ATTENTION
    section = AdapterSection(rank=PROPOSED_RANK, targets=targets)
    return None if any(_faults_of_model(section, shape, "", tensor_parallel)) else section


def first_adapters(config: Config) -> Path | None:
    """`adapter.path`, if the run starts from it: one that resumes has its adapters in a checkpoint, from then on."""
    goes_on = config.run.resume and newest_checkpoint(checkpoints_dir(config.run.dir)) is not None
    return None if goes_on else config.adapter.path


def read_saved_section(directory: Path) -> tuple[AdapterSection, str]:
    """The `[adapter]` section that a directory of peft's stands for, and the name of its base.

    Raises:
        ConfigError: it is no such directory, or the adapters are of a form that is not held.
    """
    try:
        found = _read_config(directory)
    except ValueError as error:
        raise ConfigError(f"{str(directory)!r} {error}") from error
    targets, base = found.get("target_modules"), found.get("base_model_name_or_path")
    values: dict[str, Any] = {"rank": found.get("r"), "alpha": found.get("lora_alpha"), "path": directory}
    for key in ("r", "lora_alpha"):
        if isinstance(found.get(key), str | bool):
            raise ConfigError(
                f"{str(directory)!r} has {key} = {json.dumps(found[key])} in its {CONFIG_FILE}: expected a number"
            )
    if isinstance(targets, str):
        values["targets"] = [targets]
    elif isinstance(targets, list):
        # Of layers in full, as peft writes them for all-linear; which of them have factors is compared with the file.
        values["targets"] = sorted({str(name).rpartition(".")[2] for name in targets})
    try:
        section = AdapterSection.model_validate(values)
    except ValidationError as error:
        key = IN_PEFT[str((*error.errors()[0]["loc"], "targets")[0])]
        message = f"{str(directory)!r} has {key} = {found.get(key)!r}, which is not held: {error.errors()[0]['msg']}"
        raise ConfigError(message) from error
    if not section.is_given:
        raise ConfigError(f"{str(directory)!r} has no r, the rank, in its {CONFIG_FILE}: save the adapters with peft")
    return section, base if isinstance(base, str) else ""


def require_saved_adapters(adapter: AdapterSection, files: ModelFiles) -> None:
    """Checks that the adapters in `adapter.path` are those of a model.

    Raises:
        ConfigError: they are not.
    """
    for fault in _faults_of_model(adapter, files.shape, files.named, 1):
        raise ConfigError(fault)
    assert adapter.path is not None, "adapters were saved"
    for fault in chain(_faults_of_path(adapter, files.shape, adapter.path), _faults_of_base(adapter.path, files)):
        raise ConfigError(f"{str(adapter.path)!r} {fault}")


def require_form(path: Path, layers: Sequence[str]) -> None:
    """Checks that saved adapters are what these layers' factors, the rank and alpha alone say, and that all are finite.

    Raises:
        ConfigError: they are of another form; or they cannot be read.
    """
    for fault in chain(_faults_of_form(_read_config(path), layers, layers), _faults_of_values(path / WEIGHTS_FILE)):
        raise ConfigError(f"{str(path)!r} {fault}")


def factor_shapes(adapter: AdapterSection, shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Name in peft's file -> shape, of the factors A and B of all targeted layers."""
    rank = adapter.rank or 0
    found: dict[str, tuple[int, int]] = {}
    for layer, (outputs, inputs) in targeted(adapter, linear_sizes(shape)).items():
        for i in range(shape.num_layers):
            name = f"{LAYERS}{i}.{layer}"
            found |= {factor_name(name, A): (rank, inputs), factor_name(name, B): (outputs, rank)}
    return found


def _faults_of_model(adapter: AdapterSection, shape: ModelShape, named: str, tensor_parallel: int) -> Iterator[str]:
    if shape.latents is not None:
        yield (
            f"adapter.rank is {adapter.rank}, but {named} has latent attention, whose layers have no "
            "adapters: leave adapter.rank out to train all weights"
        )
    if shape.delta is not None:
        yield (
            f"adapter.rank is {adapter.rank}, but {named} has linear attention, whose layers have no "
            "adapters: leave adapter.rank out to train all weights"
        )
    others = [target for target in adapter.targets if target not in ATTENTION]
    if shape.experts is not None and others:
        yield (
            f"adapter.targets has {others[0]!r}, but the feed-forward parts of {named} are experts, which "
            f"have no adapters: name some of {', '.join(ATTENTION)}"
        )
    if shape.num_kv_heads < tensor_parallel:
        yield (
            f"adapter.rank is {adapter.rank} with trainer.tensor_parallel = {tensor_parallel}: ranks that share one of "
            f"the model's {shape.num_kv_heads} key / value heads have no adapters: lower trainer.tensor_parallel"
        )
    for layer, sizes in targeted(adapter, linear_sizes(shape)).items():
        if adapter.rank is not None and adapter.rank > min(sizes):
            yield (
                f"adapter.rank is {adapter.rank}, more than {layer} of {named} has rows or columns "
                f"({sizes[0]} x {sizes[1]}): {min(sizes)} is all that it can change; lower it"
            )


def _faults_of_path(adapter: AdapterSection, shape: ModelShape, path: Path) -> Iterator[str]:
    try:
        found = _read_config(path)
    except ValueError as error:
        yield str(error)
        return
    if not (path / WEIGHTS_FILE).is_file():
        yield f"has no {WEIGHTS_FILE}: save the adapters as safetensors"
        return
    sizes = linear_sizes(shape)
    layers, wanted = (
        [f"{LAYERS}{i}.{name}" for i in range(shape.num_layers) for name in names]
        for names in (sizes, targeted(adapter, sizes))
    )
    yield from _faults_of_form(found, layers, wanted)
    for key, name, value in (("r", "rank", adapter.rank), ("lora_alpha", "alpha", adapter.alpha)):
        if found.get(key) != value:
            yield f"has {key} = {found.get(key)!r}, but adapter.{name} is {value!r}: set it to that"
    yield from _faults_of_weights(adapter, shape, path / WEIGHTS_FILE)


def _faults_of_form(found: Mapping[str, Any], layers: Sequence[str], wanted: Sequence[str]) -> Iterator[str]:
    """That adapters are not what their factors, rank and alpha alone say; `wanted` are those of `layers` that have
    some."""
    for key, held in UNHELD.items():
        # What is empty has no effect.
        if (value := found.get(key, held)) != held and (value or held):
            yield f"has {key} = {value!r}: only {held!r} is held"
    for key in PATTERNS:
        patterns = found.get(key) or {}
        if not isinstance(patterns, dict) or not all(PLAIN.fullmatch(pattern) for pattern in patterns):
            shown = json.dumps(patterns)[:200]
            yield f"has {key} = {shown}: only a table with names of layers is held; save them again with peft"
            return
        for pattern in patterns:
            # As peft matches them.
            compiled = re.compile(rf"(.*\.)?({pattern})$")
            if any(compiled.match(layer) for layer in layers):
                yield f"has {key} for {pattern!r}: all layers need the same"
    theirs = found.get("target_modules")
    if theirs != ALL_LINEAR and not isinstance(theirs, list):
        yield f"has target_modules = {theirs!r}: only a list of names is held"
    elif isinstance(theirs, list):
        # As peft matches them.
        ends = tuple(f".{name}" for name in theirs)
        if left_out := next((layer for layer in wanted if not f".{layer}".endswith(ends)), None):
            yield f"has target_modules = {theirs!r}, without {left_out!r}: peft would leave that layer's factors out"
    if (start := found.get("init_lora_weights", True)) not in BASE_AS_IT_IS:
        yield f"has init_lora_weights = {start!r}, which changes the base: convert them as peft describes"


def _faults_of_base(path: Path, files: ModelFiles) -> Iterator[str]:
    """That saved adapters belong to other weights, as far as it can be told quickly: the trainer reads all of them."""
    if files.directory is None:
        return
    metadata = metadata_of(path / WEIGHTS_FILE)
    before, where = metadata.get(BASE_SAMPLE), ""
    for change in shape_changes(_json_object(metadata.get(BASE_SHAPE)), files.shape.as_json(), files.named):
        yield f"was trained beside another model: {change}"
    named = _read_config(path).get("base_model_name_or_path")
    if before is None and isinstance(named, str) and Path(named).is_absolute():
        before, where = _sample_if_there(Path(named)), f" of {named!r}"
    if before is not None and before != (now := weights_sample(files.directory)):
        yield (
            f"was trained beside weights{where} whose beginnings have the digest {before}, and those of {files.named} "
            f"have {now}: name the base that it belongs to (base_model_name_or_path of its {CONFIG_FILE}: {named!r})"
        )


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _sample_if_there(base: Path) -> str | None:
    """`weights_sample` of a directory that this host may have under that name, or that this user may not read."""
    try:
        return weights_sample(base)
    except (OSError, ValueError, ConfigError):
        return None


def _faults_of_vllm(config: Config) -> Iterator[str]:
    """That vLLM is started for other weights or ranks than those published; of equal options the last one decides."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for option in (*OF_THE_BASE, MAX_LORA_RANK):
        parser.add_argument(option)
    try:
        found = vars(parser.parse_known_args(config.engine_options)[0])
    except argparse.ArgumentError:
        # One without a value, which vLLM names.
        return
    remedy = "or set adapter.publish to 'merged'"
    expected = (config.model.path, config.model.dtype, "none")
    for option, right in zip(OF_THE_BASE, expected, strict=True):
        value = found[option.removeprefix("--")]
        if value is not None and value != right:
            yield (
                f"inference.engine_options has {option} {value!r}, but adapters are published for instances with the "
                f"trainer's base, {option} {right!r}: leave it out, {remedy}"
            )
    most = found["max_lora_rank"]
    if most is not None and most.isdecimal() and int(most) < (config.adapter.rank or 0):
        yield (
            f"inference.engine_options has {MAX_LORA_RANK} {most}, but adapter.rank is {config.adapter.rank}: leave it "
            f"out, {remedy}"
        )


def _read_config(path: Path) -> dict[str, Any]:
    """
    Raises:
        ValueError: there is none, or it is not that of low-rank adapters; to be said after the directory's name.
    """
    try:
        found = json.loads((path / CONFIG_FILE).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        fault = (
            f"has no {CONFIG_FILE} that can be read: {error}; name a directory that peft or async-rl export has saved"
        )
        raise ValueError(fault) from error
    if not isinstance(found, dict) or found.get("peft_type") != "LORA":
        kind = found.get("peft_type") if isinstance(found, dict) else found
        raise ValueError(f"has peft_type = {kind!r}: only 'LORA' is held")
    return found


def _faults_of_weights(adapter: AdapterSection, shape: ModelShape, file: Path) -> Iterator[str]:
    """Of the factors, by their file's header."""
    stored, expected = tensors_of(file), factor_shapes(adapter, shape)
    for name in sorted(expected.keys() - stored.keys()):
        yield f"has no {name!r}, which adapter.targets ask for: these adapters are another model's, or of other layers"
        return
    for name, tensor in stored.items():
        if name not in expected:
            yield f"has {name!r}, which would be left out: it is no layer of the model that adapter.targets name"
            return
        if tensor.shape != expected[name] or tensor.dtype not in FLOATS:
            yield (
                f"has {name!r} of shape {list(tensor.shape)} as {tensor.dtype}, and the model with adapter.rank = "
                f"{adapter.rank} needs {list(expected[name])} as one of {', '.join(FLOATS)}: these adapters are "
                "another model's, or of another rank"
            )
            return
    yield from _faults_of_values(file)


def _faults_of_values(file: Path) -> Iterator[str]:
    for name, tensor in tensors_of(file).items():
        if tensor.dtype not in FLOATS or not tensor.is_finite():
            yield (
                f"has {name!r} ({tensor.dtype}) with values that are not finite in float32: the file is damaged; save "
                "or download it again"
            )
            return
