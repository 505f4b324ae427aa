"""Every example's config is loaded, passes the pre-flight and is planned; two of them train."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.file import load_config
from async_rl.preflight import require_sound
from deploy.local.machine import Machine
from deploy.local.plan import num_ports, plan
from tests.support import ROOT

EXAMPLES = ROOT / "examples"
CONFIGS = sorted(path.parent.name for path in EXAMPLES.glob("*/run.toml"))
TWO_DEVICES = Machine(cores=(0, 1), devices=("0", "1"))


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Copies an example's folder and makes the copy the working directory."""

    def enter(example: str) -> Path:
        shutil.copytree(EXAMPLES / example, tmp_path / example)
        monkeypatch.chdir(tmp_path / example)
        return tmp_path / example

    return enter


def test_the_list_of_examples_names_every_folder_and_no_other() -> None:
    lines = (EXAMPLES / "README.md").read_text().splitlines()
    listed = [line.split("`")[1] for line in lines if line.startswith("| `")]
    assert sorted(listed) == sorted(f"{path.name}/" for path in EXAMPLES.iterdir() if path.is_dir())


@pytest.mark.parametrize("example", CONFIGS)
def test_a_config_is_sound_and_can_be_planned(
    workplace: Callable[[str], Path], tiny_model: Callable[..., Path], example: str
) -> None:
    path = workplace(example) / "run.toml"
    overrides = (f"--model.path={tiny_model('qwen3', max_position_embeddings=4096)}",)
    config = load_config(path, overrides)
    require_sound(config, trains=True, serves=True)
    ports = list(range(9000, 9000 + num_ports(config)))
    assert plan(path, config, overrides, machine=TWO_DEVICES, ports=ports).urls


@pytest.mark.distributed
@pytest.mark.parametrize("example", ["first_run", "evaluation"])
def test_an_example_trains_to_its_end(
    workplace: Callable[[str], Path], tiny_model: Callable[..., Path], example: str
) -> None:
    folder = workplace(example)
    shutil.copytree(tiny_model("qwen3", tied=True), folder / "model")
    run_dir = folder / load_config(folder / "run.toml").run.dir
    done = subprocess.run(
        [sys.executable, "-m", "deploy.local.run", "run.toml", "--train.iterations", "2"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    proofs = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    assert [proof["on_policy"] for proof in proofs] == [True, True]
    if example == "evaluation":
        (evaluation,) = [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]
        assert (evaluation["iteration"], evaluation["set"], evaluation["num_prompts"]) == (0, "held-out", 2)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_rollouts_of_several_turns_are_learned_from(workplace: Callable[[str], Path]) -> None:
    folder = workplace("guess_the_number")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for command in (
        ["make_model.py", "model"],
        ["-m", "deploy.local.run", "run.toml", "--train.iterations", "40", "--train.order", "prompt"],
    ):
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
    proofs = read(folder / "runs" / "guess" / "ledger.jsonl")
    assert len(proofs) == 40 and all(proof["on_policy"] for proof in proofs)
    assert all(14 * 16 < proof["num_turns"] <= 3 * 14 * 16 for proof in proofs)
    assert all(proof["num_branches"] == 0 and proof["num_response_tokens"] == proof["num_turns"] for proof in proofs)
    rewards = [record["reward_mean"] for record in read(folder / "runs" / "guess" / "metrics.jsonl")]
    # 0.29 by chance at first, and in the end more than three guesses find without being told anything.
    assert sum(rewards[-5:]) / 5 > max(3 / 7, sum(rewards[:5]) / 5 + 0.1), rewards


@pytest.mark.distributed
def test_the_sandboxed_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "sandbox" / "isolated.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.split("\n") == ["ok 0 b'cba\\n'", "42", "", ""], done.stderr
