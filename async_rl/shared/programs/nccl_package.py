"""The NCCL that an interpreter's torch brings, read from its packages: for checks before anything starts."""

from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
MATCHING = "torch 2.13.0 with vLLM 0.32.0 (NCCL 2.29.7), torch 2.14 or 2.15 with vLLM 0.33.0 (NCCL 2.30.7)"
"""Pairs of trainer and instances, by the requirements of their packages."""

HAS_NCCL = "with NCCL"
"""Begins the line in which an instance's interpreter says which one it has."""


def nccl_package() -> str | None:
    """Such as "2.29.7"; None where torch brings none, or packages do not say which of two it takes."""
    found = []
    for name in PACKAGES:
        try:
            found.append(version(name))
        except PackageNotFoundError:
            continue
    return found[0] if len(found) == 1 else None
