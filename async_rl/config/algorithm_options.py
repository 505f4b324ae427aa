"""`[algorithm.options]` read, and settings refused that have no effect on an algorithm.

For the algorithms, and for the checks before a start, which may not import them: they need torch.
"""

from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.section import read_options
from async_rl.errors import ConfigError


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
    refuse_unused(config, config.traits.unused)
    read_options("algorithm", config.name, config.options, config.traits.options)
