"""Every recipe is loaded, its layout accepted, planned, passes the pre-flight and `check` as it stands; two run."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rl.checks.preflight import require_sound
from async_rl.config.file import load_config
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from deploy.cluster.plan import plan_cluster
from deploy.local.check import check_run
from deploy.local.machine import Machine
from deploy.local.machine_memory import HostMemory
from deploy.local.memory_fit import Capacity, find_misfits
from deploy.local.plan import num_ports, plan, plan_instances
from tests.support import ROOT
from tests.support.published_models import CONFIGS, write_data, write_models

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
EVALUATIONS = ["paper_eval_aime24.toml"]
HEADINGS = ("What", "For", "Ran", "Run it")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data, and directories with the names that the models have on the hub."""
    root = tmp_path_factory.mktemp("recipes")
    write_models(root)
    write_data(root)
    (root / "deploy").symlink_to(ROOT / "deploy")
    return root


def num_devices(config: Config, *, trains: bool) -> int:
    ranks = config.trainer.num_local_ranks * config.cluster.training_nodes if trains else 0
    workers = config.inference.num_instances * config.inference.tensor_parallel
    return max(ranks, workers) if config.run.placement != "separate" else ranks + workers


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_passes_the_preflight_unchanged(workplace: Path, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.chdir(workplace)
    config = load_config(path)
    assert config.model.path in CONFIGS, "add the model's published sizes to tests/support/published_models.py"
    require_sound(config, trains=path.name not in EVALUATIONS, serves=True)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_passes_check_and_fits_the_memory_that_it_names(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    monkeypatch.chdir(workplace)
    config = load_config(path)
    check = check_run(path, config, (), elsewhere=True)
    assert check.errors == () and check.forecast is not None
    assert not [warning for warning in check.warnings if "cannot start yet" in warning or "on this machine" in warning]
    if path.name in EVALUATIONS:
        return
    named = re.search(r"^# For: .*? (\d+) GB", path.read_text(), re.MULTILINE)
    assert named is not None, "the memory of its devices, or of its host on CPUs"
    capacity = int(named[1]) * 10**9
    on_device = None if config.trainer.device == "cpu" else capacity
    host = HostMemory(capacity, capacity) if on_device is None else HostMemory(10**12, 10**12)
    assert find_misfits(config, check.forecast, Capacity(host, on_device)).errors == ()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_can_be_planned_on_the_devices_that_it_names(path: Path) -> None:
    config, trains = load_config(path), path.name not in EVALUATIONS
    needed = num_devices(config, trains=trains)
    on_cpu = config.trainer.device == "cpu"
    machine = Machine(cores=tuple(range(64)), devices=() if on_cpu else tuple(map(str, range(needed))))
    ports = list(range(9000, 9000 + num_ports(config)))
    if not trains:
        assert len(plan_instances(config, machine=machine, ports=ports)[1]) == config.inference.num_instances
    elif config.cluster.training_nodes == 1:
        assert plan(path, config, (), machine=machine, ports=ports).urls
    if config.run.placement != "separate":
        with pytest.raises(ConfigError, match="a cluster's launcher places instances on devices of their own"):
            plan_cluster(path, config, ())
    elif trains and not on_cpu:
        planned = plan_cluster(path, config, ())
        assert planned.num_nodes * planned.node.devices + planned.min_instances * planned.instance.devices == needed
    named = re.search(r"^# For: .*?(\d+) (NPUs|GPUs?|CPU cores)", path.read_text(), re.MULTILINE)
    assert named is not None, "its hardware, with a number"
    assert int(named[1]) == needed if not on_cpu else int(named[1]) >= needed


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_it_is_what_has_run_and_how_it_is_started(path: Path) -> None:
    head = path.read_text().split("\n\n")[0]
    headings = re.findall(r"^# ([A-Z][a-z ]+?)(?: \(.*\))?:", head, re.MULTILINE)
    assert [heading for heading in headings if heading in HEADINGS] == list(HEADINGS)
    commands = re.findall(r"^#   async-rl (\S+)(.*)$", head, re.MULTILINE)
    assert commands and all(f"recipes/{path.name}" in rest for _, rest in commands)
    expected = "eval" if path.name in EVALUATIONS else ("run", "launch")
    assert all(command in expected for command, _ in commands)
    if load_config(path).cluster.training_nodes > 1:
        assert {command for command, _ in commands} == {"launch"}


def test_the_table_lists_every_recipe_and_no_other() -> None:
    table = [line for line in (ROOT / "recipes/README.md").read_text().splitlines() if line.startswith("| [")]
    listed = re.findall(r"\[([\w.]+\.toml)\]\(\1\)", "\n".join(table))
    assert sorted(listed) == [path.name for path in RECIPES]


def test_the_scaling_recipes_differ_in_devices_only() -> None:
    def rest(total: int) -> dict[str, Any]:
        config = load_config(ROOT / f"recipes/paper_qwen3_8b_{total}npu.toml")
        assert num_devices(config, trains=True) == total
        assert config.inference.num_instances == total // 2
        tree = config.model_dump(exclude={"run": {"dir"}, "inference": {"num_instances"}})
        return {**tree, "cluster": tree["cluster"] | {"training_nodes": None}}

    assert rest(16) == rest(32) == rest(64)


def test_the_papers_evaluation_is_the_same_everywhere() -> None:
    sets = [each for path in RECIPES for each in load_config(path).evaluation.sets if each.name == "aime24"]
    assert len(sets) == 6 and len({each.model_dump_json() for each in sets}) == 1
    (each, *_) = sets
    assert (each.temperature, each.top_p, each.top_k, each.num_samples) == (0.7, 0.95, 20, 8)


def test_smollm2_is_what_the_quickstart_runs() -> None:
    assert load_config(ROOT / "recipes/smollm2.toml") == load_config(ROOT / "deploy/quickstart/smollm2/config.toml")


def run(folder: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.distributed
def test_sums_are_trained_on_a_cpu_with_a_random_model(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    prompts = ("--prompts.task_options.size", "100", "--prompts.held_out", "4", "--prompts.prompts_per_batch", "2")
    smaller = ("--train.iterations", "2", "--inference.num_instances", "1", *prompts)
    run(
        tmp_path, "deploy.local.run", str(ROOT / "recipes/chain_sum_cpu.toml"), f"--model.path={tiny_model()}", *smaller
    )
    lines = (tmp_path / "runs/chain_sum_cpu/ledger.jsonl").read_text().splitlines()
    assert [json.loads(line)["on_policy"] for line in lines] == [True, True]


@pytest.mark.distributed
def test_the_papers_evaluation_runs_on_a_cpu_with_a_random_model(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    write_data(tmp_path)
    on_cpu = ("--trainer.device", "cpu", "--inference.engine", "transformers", "--inference.num_instances", "1")
    smaller = ("--rollout.max_response_tokens", "8", "--prompts.max_prompt_tokens", "200", "--model.dtype", "float32")
    recipe = str(ROOT / "recipes/paper_eval_aime24.toml")
    own = (f"--model.path={tiny_model()}", f"--inference.python={sys.executable}", "--out", "aime24.json")
    run(tmp_path, "deploy.local.evaluate", recipe, *own, *on_cpu, *smaller)
    (result,) = json.loads((tmp_path / "aime24.json").read_text())["sets"]
    assert (result["num_prompts"], result["num_samples"], result["avg@8"]) == (30, 8, 0.0)
    assert (result["temperature"], result["top_p"], result["top_k"]) == (0.7, 0.95, 20)
    low, high = result["intervals"]["avg@8"]
    assert low == 0.0 and 0.1 < high < 0.2, "Wilson's interval of 30 prompts"
