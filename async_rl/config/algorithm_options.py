"""`[algorithm.options]` read, and settings refused that have no effect on an algorithm.

For the algorithms, and for the checks before a start, which may not import them: they need torch.
"""

from typing import TypeVar

from pydantic import ValidationError

from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.section import Section
from async_rl.errors import ConfigError

Options = TypeVar("Options", bound=Section)


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
    refuse_unused(config, config.traits.unused)
    read_options(config, config.traits.options)
