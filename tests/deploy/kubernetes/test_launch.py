"""`async-rl launch kubernetes`: what it asks of helm, and what it says without."""

import json
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support.minimal_config import MINIMAL

pytestmark = pytest.mark.distributed

Launch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL.replace("runs/x", str(tmp_path / "first-run")))
    return path


def recording_helm(folder: Path, code: int = 0) -> str:
    """A PATH whose helm writes its words to `folder`/words, and exits with `code`."""
    program = folder / "bin" / "helm"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {folder}/words\necho no cluster >&2\nexit {code}\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    return f"{program.parent}:/usr/bin:/bin"


def test_helm_upgrades_the_release_with_the_runs_values_first_and_the_clusters_after(
    launch: Launch, config: Path, tmp_path: Path
) -> None:
    done = launch(config, "--values", "ours.yaml", "--namespace", "rl", path=recording_helm(tmp_path))
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "words").read_text().splitlines()
    written = tmp_path / "first-run" / "kubernetes" / "values.json"
    assert words[:3] == ["upgrade", "--install", "first-run"] and words[3].endswith("deploy/kubernetes/chart")
    assert words[4:] == ["--namespace", "rl", "--values", str(written), "--values", "ours.yaml"]
    assert json.loads(written.read_text())["run"]["config"] == config.read_text()


def test_a_dry_run_prints_the_manifests_and_writes_nothing(launch: Launch, config: Path, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(f"image: {{trainer: a, instance: b}}\nstorage: {{mountPath: {tmp_path}}}\n")
    done = launch(config, "--values", cluster, "--dry-run", "--name", "other")
    assert done.returncode == 0, done.stderr
    named = {(each["kind"], each["metadata"]["name"]) for each in yaml.safe_load_all(done.stdout) if each}
    assert {("JobSet", "other"), ("StatefulSet", "other-instance")} <= named
    assert not (tmp_path / "first-run").exists()


def test_without_helm_a_dry_run_prints_the_values_and_the_command(launch: Launch, config: Path) -> None:
    done = launch(config, "--dry-run", path="/nowhere")
    values, _, command = done.stdout.partition("\n# helm is not installed; with it: ")
    assert done.returncode == 0 and command.startswith("helm upgrade --install first-run ")
    assert json.loads(values)["training"]["nodes"] == 1
    refused = launch(config, path="/nowhere")
    assert refused.returncode == 2 and "ConfigError: helm is not installed: install Helm" in refused.stderr


def test_what_helm_says_is_passed_on(launch: Launch, config: Path, tmp_path: Path) -> None:
    done = launch(config, path=recording_helm(tmp_path, code=3))
    assert done.returncode == 1 and "failed with code 3: no cluster" in done.stderr


def test_values_are_written_elsewhere_where_the_runs_directory_exists_in_the_pods_only(
    launch: Launch, config: Path, tmp_path: Path
) -> None:
    path = recording_helm(tmp_path)
    refused = launch(config, "--run.dir=/proc/runs/x", path=path)
    assert refused.returncode == 2 and "name another directory with --out" in refused.stderr
    done = launch(config, "--run.dir=/proc/runs/x", "--out", tmp_path / "out", path=path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "values.json").read_text())["run"]["dir"] == "/proc/runs/x"
