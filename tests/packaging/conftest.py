"""The wheel of this checkout, and environments that hold it; each is made once."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.environments import (
    PACKAGES,
    Environment,
    install_declared,
    install_from_index,
    make_environment,
)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheel and source archive, built from a copy: building leaves files beside the sources."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    build = f"import setuptools.build_meta as b; b.build_sdist({str(dist)!r}); b.build_wheel({str(dist)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=240)
    return dist


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.fixture(scope="session")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """With no extra, from the package index."""
    made = make_environment(tmp_path_factory.mktemp("base"))
    install_from_index(made, wheel)
    return made


def _with(extra: str) -> object:
    @pytest.fixture(scope="session", name=f"with_{extra}")
    def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
        made = make_environment(tmp_path_factory.mktemp(extra))
        install_declared(made, wheel, extra)
        return made

    return environment


with_serve, with_trainer, with_vllm, with_all = map(_with, ("serve", "trainer", "vllm", "all"))
