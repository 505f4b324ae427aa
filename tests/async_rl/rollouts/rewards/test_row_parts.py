"""Which parts of a reward a row names."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config.reward_section import RewardPart, RewardSection
from async_rl.rollouts.rewards.row_parts import labels_of

PARTS = tuple(RewardPart(name="exact", label=label) for label in ("math", "data/set-1", "c"))
CHOSEN = RewardSection(parts=PARTS, column="reward")


@given(st.lists(st.sampled_from(["math", "data/set-1", "c"]), min_size=1))
def test_each_named_part_scores_once_in_the_order_of_the_config(named: list[str]) -> None:
    expected = [label for label in ("math", "data/set-1", "c") if label in named]
    assert labels_of(CHOSEN, {"reward": named}) == labels_of(CHOSEN, {"reward": tuple(named)}) == expected
    assert labels_of(CHOSEN, {"reward": named[0]}) == [named[0]]


def test_without_a_column_all_parts_score() -> None:
    assert labels_of(RewardSection(parts=PARTS), {"reward": "c"}) == ["math", "data/set-1", "c"]


@pytest.mark.parametrize("value", ["bleu", "", [], ["c", "bleu"], [None], [["c"]], None, 3, True, {"c": 1}], ids=repr)
def test_anything_else_is_named_with_what_was_expected(value: Any) -> None:
    with pytest.raises(
        ValueError, match=r"its row's 'reward' \(reward\.column\) is .*: expected math, data/set-1, c \("
    ):
        labels_of(CHOSEN, {"reward": value})


def test_a_row_without_the_column_is_named() -> None:
    with pytest.raises(ValueError, match=r"its row has no column 'reward' .*: expected math, .*; it has \['answer'\]"):
        labels_of(CHOSEN, {"answer": 1})


@given(st.lists(st.sampled_from(["math", "data/set-1", "c"]), min_size=1))
def test_what_a_part_of_a_mixture_names_counts_for_all_of_its_rows(named: list[str]) -> None:
    expected = [label for label in ("math", "data/set-1", "c") if label in named]
    for config in (CHOSEN, RewardSection(parts=PARTS)):
        for row in ({"reward": "c"}, {"reward": None}, {}):
            assert labels_of(config, row, tuple(named)) == expected
