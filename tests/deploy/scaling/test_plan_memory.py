"""Splits that have no room are left out: compared with the forecast that `async-rl check` makes of each config."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from async_rl.checks.forecast.run_forecast import RunForecast, forecast_run
from async_rl.checks.preflight.model import read_shape
from async_rl.config.file import parse_config
from deploy.local.memory_fit import GIB
from deploy.scaling.__main__ import main
from tests.deploy.scaling.test_costs import write_run
from tests.support.minimal_config import minimal_tree
from tests.support.published_models import CONFIGS


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of Qwen3-8B, with two ranks to a replica."""
    path = tmp_path_factory.mktemp("memory") / "run"
    write_run(path, random.Random(0))
    (path / "model").mkdir()
    (path / "model" / "config.json").write_text(json.dumps(CONFIGS["Qwen/Qwen3-8B"]))
    tree = minimal_tree() | {
        "model": {"path": str(path / "model"), "dtype": "bfloat16"},
        "trainer": {"device": "cuda", "tensor_parallel": 2, "recompute": "selective"},
        "inference": {"engine": "vllm", "tensor_parallel": 2},
    }
    tree["prompts"]["prompts_per_batch"] = 64
    (path / "config.json").write_text(parse_config(tree, "here").model_dump_json())
    return path


def forecast(run_dir: Path, num_replicas: int = 1, **layout: Any) -> RunForecast:
    """Of the run's config with this layout, as a user would write it."""
    tree = json.loads((run_dir / "config.json").read_text())
    tree["trainer"] |= layout
    ranks = tree["trainer"]["tensor_parallel"] * tree["trainer"]["pipeline_parallel"]
    tree["trainer"]["num_processes"] = num_replicas * ranks
    config = parse_config(tree, "here")
    return forecast_run(config, read_shape(config.model.path))


def said_of(capsys: pytest.CaptureFixture[str], run_dir: Path, *arguments: object) -> dict[str, Any]:
    assert main([str(run_dir), "--json", *map(str, arguments)]) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said


def test_only_splits_that_have_room_are_shown(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need = {number: forecast(run_dir, number).rank.num_bytes for number in range(1, 8)}
    assert need[1] > need[2] > need[3], "replicas share the optimizer's states"
    gib = (need[3] + 2**20) / GIB
    free, bound = (said_of(capsys, run_dir, "--devices", 8, *room) for room in ((), ("--device-gib", gib)))
    numbers = [{each["num_replicas"] for each in said["set_ups"][1:]} for said in (free, bound)]
    assert numbers[0] & {1, 2} and numbers[1] and not numbers[1] & {1, 2}
    memory = bound["memory"]
    assert memory["rank_bytes"] == need[bound["set_ups"][1]["num_replicas"]] and free["memory"] is None
    assert memory["instance_bytes"] == forecast(run_dir).instance.num_bytes


def test_layouts_with_room_are_named(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = said_of(capsys, run_dir, "--devices", 64, "--device-gib", 60)
    layouts = said["memory"]["layouts"]
    assert [each["recompute"] for each in layouts] == ["none", "selective", "full"]
    for layout in layouts:
        need = layout.pop("rank_bytes")
        assert need == forecast(run_dir, **layout).rank.num_bytes <= 60 * GIB
        for ways in ("tensor_parallel", "pipeline_parallel"):
            if layout[ways] > 1:
                fewer = layout | {ways: layout[ways] // 2}
                assert forecast(run_dir, **fewer).rank.num_bytes > 60 * GIB


def test_the_runs_own_set_up_is_shown_though_it_has_no_room(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for gib, said in ((20, "GiB with replicas: 1: no room\n"), (2000, "GiB with replicas: 1\n")):
        assert main([str(run_dir), "--device-gib", str(gib)]) == 0
        assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gib", "devices", "expected"),
    [
        ("40", "4", "no split of 4 devices has room: a rank of one replica needs "),
        ("1", "64", "an instance needs "),
        ("0", "64", "--device-gib is 0.0: expected a positive number"),
    ],
)
def test_what_has_no_room_at_all_is_refused(
    gib: str, devices: str, expected: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main([str(run_dir), "--devices", devices, "--device-gib", gib])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 2 and expected in capsys.readouterr().err


def test_numbers_of_devices_without_room_are_not_drawn(run_dir: Path, tmp_path: Path) -> None:
    gib = (forecast(run_dir, 3).rank.num_bytes + 2**20) / GIB
    assert main([str(run_dir), "--devices", "64", "--device-gib", str(gib), "-o", str(tmp_path / "x.svg")]) == 0
    lines = [part.split('"')[0].split() for part in (tmp_path / "x.svg").read_text().split('points="')[1:]]
    # Three replicas and an instance have eight devices.
    assert [len(line) for line in lines[:3]] == [4, 4, 4]


def test_a_run_whose_model_is_gone_is_refused(
    run_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_run(tmp_path / "run", random.Random(0))
    tree = json.loads((run_dir / "config.json").read_text())
    tree["model"]["path"] = str(tmp_path / "gone")
    (tmp_path / "run" / "config.json").write_text(json.dumps(tree))
    assert main([str(tmp_path / "run"), "--devices", "8", "--device-gib", "80"]) == 2
    assert "model.path" in capsys.readouterr().err
    assert main([str(tmp_path / "run"), "--devices", "8"]) == 0
