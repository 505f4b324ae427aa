"""The reward `regex`: a pattern of the config or of the row, and one that backtracks forever."""

import logging
import re
import time
from typing import Any

import pytest

from async_rl.config.reward_section import RewardSection
from async_rl.method.types import Prompt
from async_rl.rollouts.rewards.function import RewardTraits, load_function
from tests.support.groups import text_responses

FORMAT = r"<think>.*?</think>\s*<answer>.*?</answer>"


def score(row: dict[str, Any], *texts: str, **options: Any) -> list[float]:
    timeout_s = options.pop("timeout_s", 30.0)
    function = load_function(RewardSection(name="regex", timeout_s=timeout_s, options=options))
    scores: list[float] = function(Prompt("row7", (1,), row), text_responses(*texts), row)
    return scores


def test_a_format_is_matched_whole_and_over_lines() -> None:
    good = "<think>a\nb</think>\n<answer>c\n</answer>"
    assert score({}, good, f" {good}\n", f"So: {good}", "c", pattern=FORMAT) == [1.0, 1.0, 0.0, 0.0]


def test_a_search_finds_it_anywhere() -> None:
    assert score({}, "so 42!", "so 43", pattern=r"\b42\b", match="search") == [1.0, 0.0]


def test_rows_may_have_a_pattern_of_their_own() -> None:
    assert score({"pattern": "a+"}, "aa", "ab") == [1.0, 0.0]
    assert score({"pattern": "b"}, "b", pattern="a") == [0.0], "the config's comes first"


@pytest.mark.parametrize(
    ("row", "message"),
    [({}, "the row has no text in 'pattern'"), ({"pattern": "("}, r"the row's pattern '\(' is no regular expression")],
)
def test_a_row_without_a_pattern_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score(row, "a")


def test_a_pattern_that_backtracks_forever_is_no_match_and_leaves_time_for_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun_s = time.process_time()
    with caplog.at_level(logging.WARNING):
        assert score({}, "a" * 60, "ab", pattern="(a+)+b", timeout_s=3.0) == [0.0, 1.0]
    # Each of two responses has half of nine tenths of the time.
    assert time.process_time() - begun_s < 2.0
    assert re.search(r"prompt row7, response 0: the pattern '\(a\+\)\+b' did not come to an end", caplog.text)


def test_a_format_says_nothing_about_correctness_unless_the_config_does() -> None:
    assert RewardTraits.of(load_function(RewardSection(name="regex"))).correct_at is None
