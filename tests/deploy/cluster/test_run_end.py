"""What launchers say at the end of a run: of its files, without any process."""

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.file import parse_config
from async_rl.config.sections import Config
from async_rl.errors import ConfigError, ProcessFailed, RunDirInUse
from deploy.cluster.run_end import (
    describe_end,
    describe_finished,
    describe_saved,
    evaluation_lines,
    explain_end_of_run,
    is_finished,
    num_saved,
)
from deploy.cluster.stopping import Stopped

COMMAND = ["async-rl", "run", "a run.toml", "--run.resume=true", "--train.iterations=9"]


def config(run_dir: Path, **sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "run": {"dir": str(run_dir)},
        "model": {"path": "model"},
        "prompts": {"source": "rows.jsonl", "prompts_per_batch": 4},
        "reward": {"name": "exact"},
        "train": {"iterations": 9},
    }
    return parse_config(tree | sections, source="test")


def checkpoint(run_dir: Path, name: str) -> None:
    folder = run_dir / "checkpoints" / name
    folder.mkdir(parents=True)
    number = int(name.removeprefix("iteration-")) if name[-1].isdigit() else None
    (folder / "manifest.json").write_text(json.dumps({"content": {"iteration": number}}))


def evaluate(run_dir: Path, *records: dict[str, Any]) -> None:
    lines = [json.dumps({"set": "held-out", "num_samples": 2, "complete": True, **record}) for record in records]
    (run_dir / "evaluations.jsonl").write_text("\n".join([*lines, "no record", ""]))


def test_the_end_names_model_evaluation_and_the_commands_that_go_on(tmp_path: Path) -> None:
    evaluate(
        tmp_path,
        {"iteration": 0, "avg@2": 0.25},
        {"iteration": 5, "complete": False},
        {"iteration": 9, "avg@2": 0.5},
        {"iteration": 9, "set": "other", "reward_mean": -1},
    )
    said = describe_end(config(tmp_path))
    assert f"{tmp_path / 'model'}, a Hugging Face checkpoint" in said
    assert "held-out: avg@2 0.500 at iteration 9, 0.250 at 0" in said and "other: reward_mean -1.000 at iter" in said
    for command in ("dashboard", "report", "export"):
        assert f"async-rl {command} {tmp_path}" in said
    assert "adapters" not in said and "or with --merge" in describe_end(config(tmp_path, adapter={"rank": 4}))
    (tmp_path / "evaluations.jsonl").unlink()
    assert evaluation_lines(tmp_path) == [] and "async-rl eval" in describe_end(config(tmp_path))


def test_an_early_end_says_what_is_saved_and_how_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    checkpoint(tmp_path, "iteration-000002")
    checkpoint(tmp_path, "iteration-000010")
    checkpoint(tmp_path, ".iteration-000011.term-1.partial")
    assert num_saved(tmp_path) == 10
    said = describe_saved(config(tmp_path, train={"iterations": 20}), COMMAND)
    assert "10 of 20 iterations" in said
    assert said.endswith("async-rl run 'a run.toml' --train.iterations=9 --run.resume=true")
    assert explain_end_of_run(Stopped(2), config(tmp_path), COMMAND) == 130
    assert "stopped by SIGINT" in (said := capsys.readouterr().err) and "--run.resume=true" in said
    assert explain_end_of_run(ProcessFailed("trainer exited"), config(tmp_path), COMMAND) == 1
    assert "--run.resume=true" in capsys.readouterr().err
    assert explain_end_of_run(ConfigError("no such file"), config(tmp_path), COMMAND) == 2
    assert "resume" not in capsys.readouterr().err, "it may not be this run that is in the directory"
    for end in (RunDirInUse("in use"), ProcessFailed("trainer exited", cause="RunDirInUse")):
        assert explain_end_of_run(end, config(tmp_path), COMMAND) == 1
        assert "resume" not in capsys.readouterr().err, "it is another run's"


@pytest.mark.parametrize(
    ("every", "has_records", "said"),
    [
        (5, False, "no iteration was trained"),
        (5, True, "no checkpoint was written"),
        (0, True, "checkpoint.every is 0"),
    ],
)
def test_nothing_saved_is_said_with_the_reason(tmp_path: Path, every: int, has_records: bool, said: str) -> None:
    if has_records:
        (tmp_path / "metrics.jsonl").touch()
    assert said in describe_saved(config(tmp_path, checkpoint={"every": every}), COMMAND)


def test_a_run_is_finished_when_its_last_checkpoint_and_its_model_are_there(tmp_path: Path) -> None:
    assert not is_finished(config(tmp_path))
    checkpoint(tmp_path, "iteration-000009")
    assert not is_finished(config(tmp_path)), "ended between the two"
    (tmp_path / "model").mkdir()
    assert is_finished(config(tmp_path)) and not is_finished(config(tmp_path, train={"iterations": 10}))


def test_a_checkpoint_counts_by_its_manifest_too(tmp_path: Path) -> None:
    checkpoint(tmp_path, "iteration-000003")
    (tmp_path / "checkpoints" / "iteration-000003").rename(tmp_path / "checkpoints" / "iteration-000009")
    (tmp_path / "model").mkdir()
    assert num_saved(tmp_path) is None and not is_finished(config(tmp_path))
    checkpoint(tmp_path, "iteration-000002")
    for content in ("", "[]", '{"content": []}', '{"content": {"iteration": "9"}}'):
        (tmp_path / "checkpoints" / "iteration-000009" / "manifest.json").write_text(content)
        assert num_saved(tmp_path) == 2


@pytest.mark.parametrize(
    ("skipped", "said"),
    [
        ([], ""),
        ([0, 0.0, None, "x"], ""),
        ([0, 2, 1], "no step     in 2 iterations (1, 2)"),
        ([1] * 12, "(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...)"),
    ],
)
def test_the_end_tells_of_iterations_that_took_no_step(tmp_path: Path, skipped: list[Any], said: str) -> None:
    records = [{"iteration": i, "skipped_steps": number} for i, number in enumerate(skipped)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [*records, {}, 3]))
    found = describe_end(config(tmp_path))
    assert (said in found) if said else ("no step" not in found)


def test_epochs_are_as_many_iterations_as_the_trainer_wrote_of_just_them(tmp_path: Path) -> None:
    of_epochs = config(tmp_path, train={"epochs": 3})
    checkpoint(tmp_path, "iteration-000009")
    (tmp_path / "model").mkdir()
    assert not is_finished(of_epochs), "nobody has counted the rows"
    assert "9 of its iterations" in describe_saved(of_epochs, COMMAND)
    for text in (
        "no object",
        "[]",
        '{"train": 3}',
        '{"train": {"epochs": 3}}',
        '{"train": {"epochs": 2, "iterations": 9}}',
    ):
        (tmp_path / "config.json").write_text(text)
        assert not is_finished(of_epochs), text
    (tmp_path / "config.json").write_text('{"train": {"epochs": 3.0, "iterations": 9}}')
    assert is_finished(of_epochs) and not is_finished(config(tmp_path, train={"epochs": 4}))
    assert "9 of 9 iterations" in describe_saved(of_epochs, COMMAND)
    said = describe_finished(of_epochs)
    assert "all 9 iterations, train.epochs = 3 are trained" in said and "--train.epochs 6 would train as many" in said
