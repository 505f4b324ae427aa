"""peft's `LoraConfig` as the section [adapter]."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from async_rl.config.adapter_section import ALL_LINEAR
from async_rl.errors import ConfigError

TAKEN = ("r", "lora_alpha", "target_modules")
WITHOUT_EFFECT = (
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("megatron_config", "megatron_core", "runtime_config", "layers_pattern", "qalora_group_size"),
)
BY_DEFAULT = ("q_proj", "v_proj")
"""Where peft puts adapters in the families that are trained here, if `target_modules` is left out."""


def adapter_of(config: Any) -> dict[str, Any]:
    """
    Raises:
        ConfigError: it is no LoRA, or has something that adapters here do not have.
    """
    if isinstance(config, Mapping) or not is_dataclass(config) or _kind_of(config) != "LORA":
        raise ConfigError(
            f"peft_config is {config!r:.200}: expected peft's LoraConfig; adapters are LoRA (adapters.md)"
        )
    given: Any = config
    faults = list(_faults(given))
    if faults:
        raise ConfigError("\n".join(["peft_config cannot be trained as it is:", *faults]))
    targets = BY_DEFAULT if given.target_modules is None else given.target_modules
    targets = [targets] if isinstance(targets, str) else sorted(targets, key=str)
    return {"rank": given.r, "alpha": float(given.lora_alpha), "targets": targets}


def _kind_of(config: Any) -> Any:
    kind = getattr(config, "peft_type", None)
    return getattr(kind, "value", kind)


def _faults(config: Any) -> Iterator[str]:
    usual = type(config)()
    for each in fields(config):
        value = getattr(config, each.name)
        if each.name in (*TAKEN, *WITHOUT_EFFECT) or value == getattr(usual, each.name):
            continue
        yield f"{each.name} is {value!r:.200}: leave it at {getattr(usual, each.name)!r}"
    targets = config.target_modules
    if isinstance(targets, str) and targets != ALL_LINEAR:
        yield f"target_modules is {targets!r}: expected {ALL_LINEAR!r}, or a list of names"
