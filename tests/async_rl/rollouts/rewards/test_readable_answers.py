"""Answers that the reward cannot read are found before the run, and their rows left out with a line that names them."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.prompts_section import PromptsSection
from async_rl.config.reward_section import RewardSection
from async_rl.errors import ConfigError
from async_rl.method.types import NO_CHECK
from async_rl.rollouts.data.prompts import PromptSource
from async_rl.rollouts.rewards.readable_answers import answer_check
from tests.support.word_tokenizer import word_tokenizer

READABLE = ("12", 12, 1.5, r"\$18.90", r"\$32,\!348", "$x", "5 #### ", r"\frac{1}{2}", r"\text{(B)}", "so #### 42")
UNREADABLE = ("####", r"\boxed{}", "$$", r"\text{}")


def load(folder: Path, answers: tuple[Any, ...], reward: RewardSection, **columns: Any) -> PromptSource:
    rows = [{"prompt": str(i), "answer": answer, **columns} for i, answer in enumerate(answers)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = PromptsSection(source=str(folder / "rows.jsonl"), prompts_per_batch=1)
    return PromptSource.load(config, word_tokenizer(), 0, folder / "cache", answer_check(reward))


def test_unreadable_answers_are_named_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answers = (*READABLE, *UNREADABLE)
    for _ in range(2):  # The second time from the cache.
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            source = load(tmp_path, answers, RewardSection(name="math"))
        left_out = len(UNREADABLE)
        assert len(source) == len(READABLE)
        assert f"{left_out} of {len(answers)} prompts have an answer that the reward cannot read" in caplog.text
        assert "is no mathematical expression" in caplog.text
    numbers = {int(source.batch(i).prompts[0].prompt_id) for i in range(len(source))}
    assert set(range(len(READABLE))) == numbers
    # Another reward takes any text, and has a table of its own.
    assert len(load(tmp_path, answers, RewardSection(name="exact"))) == len(answers)


def test_without_a_readable_answer_there_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"2 of 2 prompts have an answer that the reward cannot read .*none is left"):
        load(tmp_path, ("####", "$$"), RewardSection(name="math"))


def test_only_rows_that_math_scores_are_looked_at(tmp_path: Path) -> None:
    parts = [{"name": "math", "label": "m", "weight": 1.0}, {"name": "exact", "label": "e", "weight": 1.0}]
    reward = RewardSection(parts=parts, column="kind")
    check = answer_check(reward)
    assert check.fault_of({"answer": "####", "kind": "m"}, ()) is not None
    assert check.fault_of({"answer": "####", "kind": "e"}, ()) is None
    assert check.fault_of({"answer": "####", "kind": "m"}, ("e",)) is None
    assert check.fault_of({"answer": {}, "kind": "e"}, ()) is not None
    assert check.fault_of({"answer": "####"}, ()) is None, "what it lacks is said where it is used"
    assert answer_check(RewardSection(name="regex")) is NO_CHECK


CHOICES = ["x", "y"]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("exact", [{"answer": 0}, {"answers": ["a", 1.5]}], [{}, {"answer": math.nan}, {"answer": ["a", None]}]),
        ("f1", [{"answer": {"text": ["a"]}}], [{"answer": " "}, {"answer": {"a": 1}}]),
        (
            "multiple_choice",
            [{"answer": "B"}, {"answer": 1, "choices": CHOICES}],
            [{"answer": "no"}, {"answer": 2, "choices": CHOICES}, {"answer": "A", "choices": ["x", None]}],
        ),
    ],
)
def test_each_reward_that_compares_says_which_rows_it_cannot_read(
    name: str, good: list[dict[str, Any]], bad: list[dict[str, Any]]
) -> None:
    check = answer_check(RewardSection(name=name))
    assert all(check.fault_of(row, ()) is None for row in good)
    assert all(check.fault_of(row, ()) for row in bad)
