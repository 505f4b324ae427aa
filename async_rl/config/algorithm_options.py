"""What each built-in algorithm reads of `[algorithm]`: its own `[algorithm.options]`, and the settings without effect.

For the algorithms, and for the checks before a start, which may not import them: they need torch.
"""

from collections.abc import Mapping

from pydantic import Field

from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.section import NoOptions, Section, read_options
from async_rl.errors import ConfigError


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
    "distillation": ("scale_by_std", "overlong_tokens", "kl_in"),
    "dppo": ("clip_low", "clip_high"),
    # Shaped rewards may be negative.
    "maxrl": ("scale_by_std", "overlong_tokens", "kl_in"),
    "online_dpo": (
        *("kl_coef", "kl_estimator", "kl_in", "entropy_coef", "teacher", "teacher_coef"),
        *("importance", "importance_low", "importance_high"),
        *("normalize", "scale_by_std", "clip_low", "clip_high"),
    ),
    "ppo": ("scale_by_std",),
    "reinforce_pp_baseline": ("scale_by_std",),
    "sapo": ("clip_low", "clip_high"),
}
"""Settings that have no effect; the others use all."""


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
    read_options("algorithm", config.name, config.options, OPTIONS.get(config.name, NoOptions))
