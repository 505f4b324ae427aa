"""`async-rl eval` on real parts: a tiny model, the embedded engine and a reward in its worker process."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from async_rl.config.file import load_config
from async_rl.errors import ConfigError
from deploy.local.evaluate import config_text, parse, set_name

REWARD = """
def short(prompt, responses, row):
    return [1.0 if len(r.text) < row["limit"] else 0.0 for r in responses]


short.correct_at = 1.0
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"Word {i}: ", "limit": 8 if i % 2 else 99} for i in range(6)]
    path = tmp_path / "words.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def evaluate(model: Path, data: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    reward = f"python:{data.parent / 'reward.py'}:short"
    command = [
        sys.executable,
        "-m",
        "deploy.local.evaluate",
        str(model),
        "--data",
        str(data),
        "--reward",
        reward,
        *arguments,
    ]
    command += ["--prompts.chat_template", "false", "--prompts.max_prompt_tokens", "64"]
    environment = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)


@pytest.mark.distributed
def test_a_model_is_evaluated_from_start_to_figures(tiny_model: Callable[..., Path], data: Path) -> None:
    before = set(psutil.pids())
    done = evaluate(tiny_model(), data, "--samples", "4", "--max-tokens", "16", "--max-prompts", "5", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    (words,) = result["sets"]
    assert (words["set"], words["num_prompts"], words["total_prompts"], words["num_samples"]) == ("words", 5, 5, 4)
    assert 3 / 5 <= words["pass@1"] <= words["pass@2"] <= words["pass@4"] <= 1.0
    assert words["reward_mean"] == pytest.approx(words["pass@1"])
    assert 1 <= words["response_tokens_mean"] <= 16 and 0 <= words["cut_share"] <= 1
    assert "pass@4" in done.stdout.rsplit("\n", 2)[0], "the table comes before the JSON object"
    ours = [pid for pid in set(psutil.pids()) - before if _works_on(pid, str(data))]
    assert ours == []


@pytest.mark.distributed
def test_the_log_that_an_error_names_is_there(tiny_model: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    nobody = ("--instances", "http://127.0.0.1:9", "--pool.timeout_s", "1")
    done = evaluate(tiny_model(), data, *nobody, TMPDIR=str(tmp_path))
    assert done.returncode == 1 and "NoInstanceLeft" in done.stderr, done.stderr
    (log,) = re.findall(r"its log is (\S+?)\)", done.stderr)
    assert "NoInstanceLeft" in Path(log).read_text()


@pytest.mark.distributed
def test_a_value_that_cannot_work_is_named_before_anything_starts(tmp_path: Path, data: Path) -> None:
    done = evaluate(tmp_path, data, "--samples", "0")
    assert done.returncode == 2
    assert "evaluation.sets.0.num_samples: Input should be greater than or equal to 1 (got 0)" in done.stderr


def test_options_become_a_config_with_one_set(tmp_path: Path) -> None:
    words = [
        '/models/"é𝄞"',
        "--data",
        "data/held out.jsonl",
        "--reward",
        "math",
        "--samples",
        "8",
        "--temperature",
        "0",
    ]
    options, overrides = parse([*words, "--instances", "http://a:1,http://b:2", "--prompts.column", "question"])
    path = tmp_path / "evaluation.toml"
    path.write_text(config_text(options, tmp_path))
    config = load_config(path, overrides)
    assert (config.model.path, config.prompts.column) == ('/models/"é𝄞"', "question")
    assert config.pool.instances == ("http://a:1", "http://b:2")
    (the_set,) = config.evaluation.sets
    assert (the_set.name, the_set.num_samples, the_set.temperature, the_set.max_prompts) == ("held-out", 8, 0.0, None)


def test_a_program_that_rewards_itself_needs_no_reward(tmp_path: Path) -> None:
    words = ["model", "--data", "rows.jsonl", "--program", "python:environment.py:rollout", "--max-tokens", "99"]
    path = tmp_path / "evaluation.toml"
    path.write_text(config_text(parse(words)[0], tmp_path))
    config = load_config(path)
    assert (config.rollout.program, config.rollout.max_response_tokens) == ("python:environment.py:rollout", 99)
    assert config.reward.name is None
    path.write_text(config_text(parse(words[:3])[0], tmp_path))
    with pytest.raises(ConfigError, match=r"reward\.name is not set, but rollout\.program = 'single_turn' needs"):
        load_config(path)


@pytest.mark.parametrize(
    ("source", "name"),
    [("a/b/aime 24.parquet", "aime-24"), ("reasoning-gym:spell_backward", "spell_backward"), ("x.jsonl", "x")],
)
def test_a_set_is_called_after_its_source(source: str, name: str) -> None:
    assert set_name(source) == name


def _works_on(pid: int, word: str) -> bool:
    try:
        return any(word in argument for argument in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False
