"""Environments that contain only the wheel and the packages it declares.

`install_from_index` uses pip and the package index, as users do. `install_declared` links the same packages from the
environment of these tests: everything the wheel's metadata requires, directly or indirectly. That takes a second even
for torch, and undeclared packages are missing there in the same way.
"""

import importlib.metadata
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import ROOT

PACKAGES = ("async_rl", "inference_service", "trainer", "deploy")
OURS = "async-rl"


@dataclass(frozen=True)
class Environment:
    """A virtual environment without pip; `home` is a sibling folder in which its programs run."""

    path: Path
    home: Path

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return next((self.path / "lib").glob("python*/site-packages"))

    def names(self) -> set[str]:
        """The canonical names of the distributions in it."""
        found = importlib.metadata.distributions(path=[str(self.site_packages)])
        return {canonicalize_name(each.name) for each in found}

    def run(
        self, *command: str | Path, timeout_s: float = 240, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program of its `bin`, outside the checkout in `home` unless `cwd` is given; the output includes
        standard error."""
        program, *arguments = command
        return subprocess.run(
            [self.path / "bin" / program, *arguments],
            cwd=cwd or self.home,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"COLUMNS": "300"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )


def make_environment(directory: Path) -> Environment:
    made = Environment(directory / "venv", directory / "home")
    venv.create(made.path)
    made.home.mkdir()
    return made


def install_from_index(environment: Environment, wheel: Path) -> None:
    """Installs like `pip install`, with the versions of constraints.txt."""
    _pip(environment, "install", "-c", str(ROOT / "constraints.txt"), str(wheel))


def install_declared(environment: Environment, wheel: Path, extra: str) -> None:
    """Installs the wheel, and links to its requirements with `extra`; fails if they are incompatible."""
    _pip(environment, "install", "--no-deps", "--no-index", str(wheel))
    here = [str(environment.site_packages), *sys.path]
    for distribution in _closure(Requirement(f"{OURS}[{extra}]"), here):
        if canonicalize_name(distribution.name) != OURS:
            _link(distribution, environment.site_packages)
    _pip(environment, "check")


def _pip(environment: Environment, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(environment.python), "--disable-pip-version-check"]
    done = subprocess.run([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout


def _closure(wanted: Requirement, path: list[str]) -> Iterator[importlib.metadata.Distribution]:
    """The distribution of `wanted` and all its requirements, each once; from the first entry of `path` that has it."""
    seen: set[tuple[str, str]] = set()
    waiting = [wanted]
    while waiting:
        requirement = waiting.pop()
        distribution = next(iter(importlib.metadata.distributions(name=requirement.name, path=path)))
        for extra in ("", *sorted(requirement.extras)):
            if (key := (canonicalize_name(requirement.name), extra)) in seen:
                continue
            seen.add(key)
            asked = map(Requirement, distribution.requires or ())
            waiting += [each for each in asked if each.marker is None or each.marker.evaluate({"extra": extra})]
            yield distribution


def _link(distribution: importlib.metadata.Distribution, site_packages: Path) -> None:
    tops = {Path(file).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
    for top in tops:
        link = site_packages / top
        if not link.exists():
            link.symlink_to(str(distribution.locate_file(top)))
