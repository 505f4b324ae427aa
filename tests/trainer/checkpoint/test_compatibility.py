"""What may change between a checkpoint and the run that goes on from it."""

import logging
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.file import parse_config
from async_rl.config.sections import Config
from async_rl.data.prompt_table import PromptTable
from async_rl.errors import ConfigError
from async_rl.rewards.identity import reward_identity
from trainer.checkpoint.compatibility import Contents, require_same_run


def config(**sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "run": {"dir": "run"},
        "model": {"path": "model"},
        "prompts": {"source": "rows.jsonl", "prompts_per_batch": 4},
        "reward": {"name": "math"},
        "train": {"iterations": 3},
    }
    return parse_config({key: tree.get(key, {}) | sections.get(key, {}) for key in tree | sections}, source="test")


def contents(answers: list[str], reward: str = "math by math-verify 0.8") -> Contents:
    table = PromptTable()
    for number, answer in enumerate(answers):
        table.append(number, (5, 6, 7), {"answer": answer})
    return Contents(table.digests(), reward)


ANSWERS = [str(i) for i in range(300)]


def go_on(now: Config, now_contents: Contents | None = None, saved: Contents | None = None) -> None:
    before = saved.as_json() if saved is not None else None
    require_same_run(config().model_dump(mode="json"), now, "iteration-000002", before, now_contents)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": {"learning_rate": 1e-5, "warmup_iterations": 4}},
        {"reward": {"name": "math", "timeout_s": 9, "max_concurrency": 2, "on_error": "retry", "max_attempts": 5}},
        {"train": {"iterations": 9}},
        {"trainer": {"tensor_parallel": 2}},
        {"pool": {"timeout_s": 9}},
    ],
)
def test_what_decides_nothing_may_change(changes: dict[str, Any]) -> None:
    go_on(config(**changes), contents(ANSWERS), contents(ANSWERS))


def test_rows_that_changed_are_named_by_their_stretch() -> None:
    edited = [*ANSWERS[:150], "another", *ANSWERS[151:]]
    with pytest.raises(
        ConfigError, match=r"prompts have changed somewhere in rows 150 to 153|in rows 14\d to 15\d"
    ) as e:
        go_on(config(), contents(edited), contents(ANSWERS))
    assert "run.accept_changes" in str(e.value)


def test_rows_that_were_added_or_left_out_are_noticed() -> None:
    with pytest.raises(ConfigError, match=r"rows 0 to 300 .* are used, but were 0 to 299"):
        go_on(config(), contents([*ANSWERS, "more"]), contents(ANSWERS))


def test_another_reward_under_the_same_name_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def score(*_): return [1.0]\n")
    name = f"python:{file}:score"
    before = reward_identity(name)
    file.write_text("def score(*_): return [0.0]\n")
    assert reward_identity(name) != before != reward_identity(f"python:{file}:other")
    with pytest.raises(ConfigError, match=r"the reward is score in a file with sha256 .*, but was score in a file"):
        go_on(config(), contents(ANSWERS, reward_identity(name)), contents(ANSWERS, before))


def test_the_same_contents_may_lie_elsewhere() -> None:
    moved = config(prompts={"source": "/elsewhere/rows.jsonl"})
    go_on(moved, contents(ANSWERS), contents(ANSWERS))
    with pytest.raises(ConfigError, match=r"prompts\.source is '/elsewhere/rows.jsonl', but was 'rows.jsonl'"):
        go_on(moved)


def test_a_checkpoint_without_contents_is_taken_on_its_settings() -> None:
    go_on(config(), contents(ANSWERS), None)
    with pytest.raises(ConfigError, match=r"run\.seed is 4, but was 0"):
        go_on(config(run={"seed": 4}), contents(ANSWERS), None)


def test_changes_can_be_accepted_and_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    accepting = config(run={"accept_changes": True, "seed": 4})
    with caplog.at_level(logging.WARNING):
        go_on(accepting, contents([*ANSWERS, "more"]), contents(ANSWERS))
    assert "run.seed is 4, but was 0" in caplog.text and "rows 0 to 300" in caplog.text
