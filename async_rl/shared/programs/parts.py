"""The optional parts. The rest imports none of them, finds them here when a run uses them, and goes on without those
whose folders are removed.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from async_rl.errors import ConfigError

PARTS: Mapping[str, str] = {
    "gateway": "async_rl.parts.gateway",
    "environments": "async_rl.parts.environments",
    "sandbox": "async_rl.parts.sandbox",
    "dashboard": "async_rl.parts.dashboard",
    "slurm": "deploy.slurm",
    "ray": "deploy.ray",
    "kubernetes": "deploy.kubernetes",
}
"""Part -> its package. Its tests are in the folder of the same path below tests/."""


ROOT = Path(__file__).parents[3]
"""Where our packages are, installed or in a checkout."""


def folder_of(part: str) -> str:
    return PARTS[part].replace(".", "/")


def has_part(part: str) -> bool:
    # Python itself would take a folder that only has __pycache__ any more for a package.
    return (ROOT / folder_of(part) / "__init__.py").is_file()


def require_part(part: str) -> None:
    """
    Raises:
        ConfigError: the part's folder was removed.
    """
    if not has_part(part):
        raise ConfigError(
            f"the optional part {part!r} is missing here: restore its folder {folder_of(part)}/, or use another one"
        )


def load_part(part: str, module: str) -> Any:
    """A module of the part.

    Raises:
        ConfigError: see `require_part`.
    """
    require_part(part)
    return import_module(f"{PARTS[part]}.{module}")
