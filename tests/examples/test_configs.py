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

from async_rl.checks.preflight import require_sound
from async_rl.config.file import load_config
from deploy.local.machine import Machine
from deploy.local.plan import num_ports, plan
from tests.support import ROOT
from tests.support.chat_tokenizer import make_chat_model
from tests.support.json_service import JsonService, running
from tests.support.parts import needs_part

EXAMPLES = ROOT / "examples"
NEEDS = {"agent": [needs_part("gateway")]}
CONFIGS = sorted(path.parent.name for path in EXAMPLES.glob("*/run.toml"))
SMALLER = {
    "mixture": ("--model.path", "model", "--model.dtype", "float32", "--rollout.max_response_tokens", "32"),
}
"""For the tests' tiny model."""
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


@pytest.mark.parametrize("example", [pytest.param(name, marks=NEEDS.get(name, [])) for name in CONFIGS])
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
@pytest.mark.parametrize("example", ["first_run", "algorithm", "evaluation", "mixture"])
def test_an_example_trains_to_its_end(
    workplace: Callable[[str], Path], tiny_model: Callable[..., Path], example: str
) -> None:
    folder = workplace(example)
    shutil.copytree(tiny_model("qwen3", tied=True), folder / "model")
    run_dir = train(folder, *SMALLER.get(example, ()))
    if example == "mixture":
        parts = {key for record in read(run_dir / "metrics.jsonl") for key in record if key.startswith("reward_mean/")}
        assert parts == {"reward_mean/sums", "reward_mean/words"} and len(list((run_dir / "prompts").iterdir())) == 3
    if example == "evaluation":
        evaluations = read(run_dir / "evaluations.jsonl")
        assert [each["iteration"] for each in evaluations] == [0, 2], "at first, and with the final weights"
        assert all((each["set"], each["num_prompts"]) == ("held-out", 2) for each in evaluations)


def train(folder: Path, *overrides: str) -> Path:
    """Two iterations of a config; returns the directory of the run."""
    done = subprocess.run(
        [sys.executable, "-m", "deploy.local.run", "run.toml", "--train.iterations", "2", *overrides],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = folder / load_config(folder / "run.toml").run.dir
    assert [proof["on_policy"] for proof in read(run_dir / "ledger.jsonl")] == [True, True]
    return run_dir


@pytest.mark.distributed
def test_each_part_of_a_mixture_has_its_own_program(workplace: Callable[[str], Path]) -> None:
    folder = workplace("mixture")
    make_chat_model(folder / "model")
    # The second turn has room after 512 tokens of the first.
    options = (*SMALLER["mixture"], "--rollout.max_response_tokens", "600")
    run_dir = train(folder, *options, "--rollout.program", "python:programs.py:rollout")
    turns: dict[str, set[int]] = {"sums": set(), "words": set()}
    for group in read(run_dir / "timeline.jsonl"):
        turns[group["prompt_id"].partition("/")[0]].add(group["num_turns"])
    assert turns == {"sums": {8}, "words": {16}}


@pytest.mark.distributed
def test_the_test_of_ones_own_algorithm_passes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_algorithm.py"],
        cwd=EXAMPLES / "algorithm",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0 and done.stdout.startswith(".."), done.stdout + done.stderr


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
def test_rewards_that_rows_choose_are_trained_on_and_recorded_by_part(
    workplace: Callable[[str], Path], tiny_model: Callable[..., Path]
) -> None:
    """Two replicas of one prompt each, so that parts pass between ranks; the judge is a server of this test."""
    folder = workplace("rewards")
    with running(JsonService(lambda body: {"choices": [{"message": {"content": "Fine.\n7/10"}}]})) as judge:
        text = (folder / "run.toml").read_text()
        (folder / "run.toml").write_text(text.replace("http://127.0.0.1:9000", judge.url))
        changes = {
            "model.path": str(tiny_model("qwen3", max_position_embeddings=512)),
            "model.dtype": "float32",
            "rollout.max_response_tokens": 8,
            "rollout.responses_per_prompt": 2,
            "train.iterations": 2,
            "trainer.num_processes": 2,
        }
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "deploy.local.run",
                "run.toml",
                *(f"--{key}={value}" for key, value in changes.items()),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=250,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = folder / "runs" / "rewards"
    rows = read(run_dir / "timeline.jsonl")
    labels = [[key for key in row if key.startswith("reward/")] for row in rows]
    # An epoch has two rows of each kind, and a random model gives no answer that is right.
    assert sorted(labels) == [["reward/judge"]] * 2 + [["reward/math", "reward/format"]] * 2
    for row, named in zip(rows, labels, strict=True):
        assert row["reward_mean"] == (0.7 if named == ["reward/judge"] else 0.0)
    records = read(run_dir / "metrics.jsonl")
    assert {key for record in records for key in record if key.startswith("reward/")} == {
        label for named in labels for label in named
    }
    assert all(record.get("reward/judge", 0.7) == 0.7 and record.get("accuracy", 0.0) == 0.0 for record in records)
    assert len(judge.bodies) == 4 and "How well does the text do" in judge.bodies[0]["messages"][0]["content"]


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
