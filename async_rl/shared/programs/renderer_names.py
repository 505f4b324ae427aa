"""The names that `rollout.options.renderer` may have; for the pre-flight and for the renderers themselves."""

from importlib import import_module

from async_rl.errors import ConfigError
from async_rl.shared.programs.extras import require_extras

AUTO = "auto"
"""The renderer of the `renderers` package for the model, by its name."""

TEMPLATE = "template"
"""The tokenizer's chat template."""


def require_renderer(name: str) -> None:
    """Checks that there is a renderer called `name`, and the package that it is from.

    Raises:
        ConfigError: the package is not installed, or has none of that name.
    """
    if name == TEMPLATE:
        return
    require_extras(f"rollout.options.renderer = {name!r}", "agents")
    if name == AUTO:
        return
    # Imported here: the package is an extra, and takes a second.
    try:
        import_module("renderers.configs").config_from_name(name)
    except ValueError as error:
        known = sorted(set(import_module("renderers.base").MODEL_RENDERER_MAP.values()))
        raise ConfigError(
            f"rollout.options.renderer is {name!r}: expected {AUTO}, {TEMPLATE}, {', '.join(known)}; {TEMPLATE} does "
            "for any model"
        ) from error
