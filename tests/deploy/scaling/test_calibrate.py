"""`async-rl calibrate` on real runs, and what it refuses before one starts."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from async_rl.config.file import load_config
from async_rl.shared.locks.run_lock import require_unlocked
from deploy.scaling.calibrate import main, runs_of
from tests.support import ROOT
from tests.support.chat_tokenizer import make_chat_model


@pytest.fixture
def config(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    rows = [{"prompt": f"What is {n} and {n}?", "answer": str(2 * n)} for n in range(64)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(
        "def length(prompt, responses, row):\n    return [float(len(r.token_ids) % 5) for r in responses]\n"
    )
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
[run]
dir = "run"
[model]
path = "{tiny_model("qwen3")}"
[prompts]
source = "rows.jsonl"
prompts_per_batch = 4
max_prompt_tokens = 64
chat_template = false
[rollout]
responses_per_prompt = 2
max_response_tokens = 12
[reward]
name = "python:reward.py:length"
[train]
epochs = 3
"""
    )
    return path


@pytest.mark.distributed
@pytest.mark.nightly
def test_two_short_runs_of_a_config_tell_what_its_parts_cost(config: Path) -> None:
    command = [sys.executable, "-m", "deploy.scaling.calibrate", "run.toml", "--iterations", "6", "--json"]
    command += ["--devices", "8", "--optimizer.learning_rate", "1e-5"]
    done = subprocess.run(command, cwd=config.parent, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the first iteration began after") == 2
    said = json.loads(done.stdout)
    assert said["set_ups"][0]["num_instances"] == 1 and all(each["devices"] <= 8 for each in said["set_ups"])
    assert said["costs"]["row_s"] >= 0 and said["costs"]["slower_decoding"] >= 1
    folders = [config.parent / "run-calibration" / name for name in ("beside", "after")]
    for folder, prompts, mode in zip(folders, (4, 2), ("periodic", "synchronous"), strict=True):
        used = json.loads((folder / "config.json").read_text())
        assert (used["prompts"]["prompts_per_batch"], used["train"]["mode"]) == (prompts, mode)
        assert used["optimizer"]["learning_rate"] == 1e-5 and not (folder / "model").exists()
    again = [sys.executable, "-m", "deploy.scaling", *map(str, folders), "--json", "--devices", "8"]
    assert json.loads(subprocess.run(again, cwd=ROOT, capture_output=True, text=True).stdout) == said
    again += ["--without=dock", "--without=tail", "--changes=0.1"]
    without = json.loads(subprocess.run(again, cwd=ROOT, capture_output=True, text=True).stdout)
    assert without["as_the_run"].keys() == without["schedules"].keys() and said["as_the_run"] is None
    assert without["costs"]["publish_s"] != said["costs"]["publish_s"] > 0 and said["publish"]["chain"] > 0


@pytest.mark.distributed
@pytest.mark.nightly
def test_a_signal_ends_the_run_that_goes_on(config: Path) -> None:
    """And no other one begins."""
    command = [sys.executable, "-m", "deploy.scaling.calibrate", "run.toml", "--iterations", "500"]
    run = subprocess.Popen(command, cwd=config.parent, stderr=subprocess.PIPE, text=True)
    folder = config.parent / "run-calibration"
    deadline = time.monotonic() + 120
    while not (folder / "beside" / "metrics.jsonl").is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    run.send_signal(signal.SIGTERM)
    said = run.communicate(timeout=180)[1]
    assert run.returncode == 143 and "is not complete: remove it to begin again" in said, said
    require_unlocked(folder / "beside")
    assert not (folder / "after").exists()


def test_each_run_of_a_batch_with_many_steps_has_a_prompt_for_each(config: Path) -> None:
    words = ["--train.steps_per_batch=3", "--algorithm.old_policy=model"]
    runs = runs_of(load_config(config, words), config.parent / "runs", 5)
    prompts = [load_config(config, [*words, *settings]).prompts.prompts_per_batch for settings in runs.values()]
    assert prompts == [4, 3]


@pytest.mark.distributed
@pytest.mark.nightly
def test_a_run_that_tells_no_costs_is_the_last_one(config: Path) -> None:
    """Rollouts of several turns: what is no plan's run is known after the first of both."""
    (config.parent / "program.py").write_text(
        "async def rollout(prompt, policy):\n"
        "    turn = await policy.generate(prompt.messages, max_tokens=4)\n"
        "    again = {'role': 'user', 'content': 'again'}\n"
        "    await policy.generate([*prompt.messages, turn.message, again], max_tokens=4)\n"
    )
    command = [sys.executable, "-m", "deploy.scaling.calibrate", "run.toml", "--iterations", "6"]
    command += ["--model.path", str(make_chat_model(config.parent / "chat")), "--prompts.chat_template", "true"]
    command += ["--rollout.program", "python:program.py:rollout", "--rollout.options", '{renderer = "qwen3"}']
    command += ["--rollout.max_response_tokens", "96"]
    done = subprocess.run(command, cwd=config.parent, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2 and "answered once in one turn" in done.stderr, done.stderr
    assert not (config.parent / "run-calibration" / "after").exists()


@pytest.mark.distributed
def test_a_run_that_left_nothing_is_not_to_be_removed(config: Path) -> None:
    command = [sys.executable, "-m", "deploy.scaling.calibrate", "run.toml", "-o", "/proc/none"]
    done = subprocess.run(command, cwd=config.parent, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2 and "run.dir '/proc/none/beside' cannot be made" in done.stderr, done.stderr
    assert "remove it" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--iterations", "4"], "--iterations is 4: expected more than 4"),
        (["--devices", "0"], "--devices is 0: expected at least 1"),
        (["--train.mode", "synchronous"], "train.mode is 'synchronous'"),
        (["-o", "."], "'.' exists: plan from it"),
        (["--train.modes", "x"], "train.mode"),
        (["--trainer.num_processes", "2"], "trainer.num_processes is 2, and a replica has 1: a plan goes by"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(
    words: list[str], message: str, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(config.parent)
    try:
        code = main([str(config), *words])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 2 and message in capsys.readouterr().err
    assert not (config.parent / "run-calibration").exists()
