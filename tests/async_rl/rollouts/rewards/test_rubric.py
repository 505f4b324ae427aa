"""What a judge is asked, and which numbers of its answers count."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config.reward_section import JudgeOptions
from async_rl.errors import ConfigError
from async_rl.rollouts.rewards.rubric import Rubric


def rubric(text: str = "{response}", **options: Any) -> Rubric:
    return Rubric(JudgeOptions(url="http://a", model="m", rubric=text, **options))


def test_placeholders_are_the_response_and_columns_and_nothing_else_is_touched() -> None:
    text = 'Q: {prompt} A: {response} Gold: {answer}. Reply as {"score": 3} or {}.'
    row = {"prompt": [{"role": "user", "content": "2 + 3?"}], "answer": 5}
    asked = rubric(text).task("{answer} {prompt}", row)
    assert asked == 'Q: user: 2 + 3? A: {answer} {prompt} Gold: 5. Reply as {"score": 3} or {}.'


@pytest.mark.parametrize("row", [{}, {"question": None}, {"question": math.nan}])
def test_a_column_that_the_row_has_no_value_for_is_named(row: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"reward\.options\.rubric has \{question\}, but the row has no value for it: .*'prompt'"
    ):
        rubric("{question} {response}").task("a", {"prompt": "p", **row})


def test_a_message_without_content_says_nothing() -> None:
    row = {"prompt": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "tool_calls": []}]}
    assert rubric("{prompt}|{response}").task("5", row) == "user: 2 + 3?\n\nassistant: |5"


def test_the_text_may_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "rubric.txt").write_text("Rate: {response}")
    assert rubric(str(tmp_path / "rubric.txt")).text == "Rate: {response}"
    (tmp_path / "rubric.txt").write_text("Rate it")
    with pytest.raises(ConfigError, match=r"the file '.*rubric.txt' nowhere has \{response\}"):
        rubric(str(tmp_path / "rubric.txt"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"text": "none.txt"},
            r"reward\.options\.rubric is 'none.txt': it is no text with \{response\} in it, and cannot be read",
        ),
        ({"text": "x" * 5000}, "cannot be read as a file"),
    ],
)
def test_a_rubric_that_cannot_be_used_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rubric(**options)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("7", 0.7),
        ("Good, but long: 2 mistakes.\n**Score: 7**\n\n", 0.7),
        ("7/10", 0.7),
        ("Score: 7 out of 10.", 0.7),
        ("7.5", 0.75),
        ("0", 0.0),
        ("10", 1.0),
        ("10/10", 1.0),
        ("-1", None),
        ("11", None),
        ("7/100", None),
        ("7 or 8", None),
        ("seven", None),
        ("7\nThat is all", None),
        ("v2", None),
        ("nan", None),
        ("9" * 400, None),
        ("", None),
    ],
)
def test_the_number_in_the_last_line_counts_if_it_is_the_only_one_and_on_the_scale(
    answer: str, reward: float | None
) -> None:
    assert rubric(max_score=10).reward(answer) == reward


@pytest.mark.parametrize(
    ("answer", "reward"), [("[[3]] then [[5]] 1", 1.0), ("[[1]]", 0.0), ("5", None), ("[[six]]", None), ("[[6]]", None)]
)
def test_a_pattern_finds_the_last_score(answer: str, reward: float | None) -> None:
    assert rubric(score_pattern=r"\[\[(.*?)\]\]", min_score=1, max_score=5).reward(answer) == reward


@given(st.text(), st.floats(-100, 100), st.floats(-100, 100))
def test_a_reward_is_none_or_from_0_to_1(answer: str, low: float, high: float) -> None:
    if low < high:
        for text in (answer, f"{low}", f"{(low + high) / 2}"):
            reward = rubric(min_score=low, max_score=high).reward(text)
            assert reward is None or 0 <= reward <= 1
