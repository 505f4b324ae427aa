"""Whether this interpreter has what a program needs; asked by each program before it imports what an extra brings.

The package itself brings what its command line, its rewards and a client of the pool need. All else comes with extras,
the `[project.optional-dependencies]` of pyproject.toml.
"""

import sys
from importlib.util import find_spec

from async_rl.errors import ConfigError

MODULES = {
    "trainer": (
        "fastapi",
        "huggingface_hub",
        "megatron",
        "numpy",
        "prometheus_client",
        "pyarrow",
        "safetensors",
        "tensorboard",
        "torch",
        "transformers",
        "uvicorn",
        "xxhash",
    ),
    "serve": (
        "fastapi",
        "numpy",
        "prometheus_client",
        "safetensors",
        "torch",
        "transformers",
        "uvicorn",
        "xxhash",
    ),
    "vllm": ("xxhash",),
    "tasks": ("math_verify", "reasoning_gym"),
}
"""Extra -> the modules that its packages are imported as."""


def require_extras(program: str, *extras: str) -> None:
    """Checks that all modules of `extras` can be imported, without importing them.

    Raises:
        ConfigError: some cannot; names them, and the extras to install.
    """
    missing = {name: [module for module in MODULES[name] if find_spec(module) is None] for name in extras}
    if any(missing.values()):
        modules = ", ".join(dict.fromkeys(module for modules in missing.values() for module in modules))
        names = ",".join(name for name, modules in missing.items() if modules)
        raise ConfigError(
            f"{program} needs {modules}, missing in {sys.executable}: install 'async-rl[{names}]' there, in a checkout "
            f"with `pip install -e '.[{names}]'`"
        )
