"""What each built-in algorithm reads of `[algorithm]`: its own `[algorithm.options]`, and the settings without effect.

For the algorithms, and for the checks before a start, which may not import them: they need torch.
"""

from collections.abc import Mapping
from typing import TypeVar

from pydantic import Field, ValidationError

from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.section import Section
from async_rl.errors import ConfigError

Options = TypeVar("Options", bound=Section)


class NoOptions(Section):
    """Of an algorithm without `[algorithm.options]`."""


class DPPOOptions(Section):
    delta: float = Field(0.2, gt=0, le=1)


class GDPOOptions(Section):
    weights: dict[str, float] = Field(default_factory=dict)


class OnlineDPOOptions(Section):
    beta: float = Field(0.1, gt=0)


class PFPPOOptions(Section):
    power: float = Field(2.0, gt=0)


class SAPOOptions(Section):
    tau_positive: float = Field(1.0, gt=0)
    tau_negative: float = Field(1.05, gt=0)


OPTIONS: Mapping[str, type[Section]] = {
    "dppo": DPPOOptions,
    "gdpo": GDPOOptions,
    "online_dpo": OnlineDPOOptions,
    "pf_ppo": PFPPOOptions,
    "sapo": SAPOOptions,
}
"""Those of the others are `NoOptions`."""

UNUSED: Mapping[str, tuple[str, ...]] = {
    "distillation": ("scale_by_std", "overlong_tokens", "overlong_penalty", "kl_in"),
    "dppo": ("clip_low", "clip_high"),
    # Shaped rewards may be negative.
    "maxrl": ("scale_by_std", "overlong_tokens", "overlong_penalty", "kl_in"),
    "online_dpo": (
        *("kl_coef", "kl_estimator", "kl_in", "kl_clamp", "entropy_coef", "teacher", "teacher_coef"),
        *("importance", "importance_low", "importance_high"),
        *("normalize", "scale_by_std", "clip_low", "clip_high"),
    ),
    "ppo": ("scale_by_std",),
    "reinforce_pp_baseline": ("scale_by_std",),
    "sapo": ("clip_low", "clip_high"),
}
"""Settings that have no effect; the others use all."""


def read_options(config: AlgorithmSection, kind: type[Options]) -> Options:
    """
    Raises:
        ConfigError: `algorithm.options` has other keys, or values that do not fit.
    """
    try:
        return kind.model_validate(config.options)
    except ValidationError as error:
        named = ", ".join(kind.model_fields) or "none"
        lines = [
            f"algorithm.options.{'.'.join(map(str, item['loc']))}: {item['msg']} (got {item['input']!r})"
            for item in error.errors()
        ]
        raise ConfigError(
            f"algorithm.name = {config.name!r} has the options {named}: correct " + "; ".join(lines)
        ) from error


def refuse_unused(config: AlgorithmSection, unused: tuple[str, ...]) -> None:
    """
    Raises:
        ConfigError: a setting that has no effect is not its default.
    """
    defaults = {key: field.default for key, field in AlgorithmSection.model_fields.items()}
    if changed := [f"algorithm.{key}" for key in unused if getattr(config, key) != defaults[key]]:
        raise ConfigError(f"algorithm.name = {config.name!r} does not use {', '.join(changed)}: remove them")


def require_used(config: AlgorithmSection) -> None:
    """Checks what a built-in algorithm reads.

    Raises:
        ConfigError: as `read_options` and `refuse_unused`.
    """
    refuse_unused(config, UNUSED.get(config.name, ()))
    read_options(config, OPTIONS.get(config.name, NoOptions))
