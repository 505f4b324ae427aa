"""Exact match and F1: what a response answers, which answers a row accepts, and how the two are compared."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.method.types import Prompt
from async_rl.rollouts.rewards.answers import accepted_answers, answer_of, normalize
from async_rl.rollouts.rewards.exact import score as exact
from async_rl.rollouts.rewards.f1 import f1
from async_rl.rollouts.rewards.f1 import score as f1_score
from tests.support.groups import text_responses

PROMPT = Prompt("row7", (1,), {})


def score(reward: Any, row: dict[str, Any], *texts: str) -> list[float]:
    scores: list[float] = reward(PROMPT, text_responses(*texts), row)
    return scores


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" Paris\n", "Paris"),
        ("It is <answer>Rome</answer>, no, <answer> Paris </answer>!", "Paris"),
        ("<think>Rome? <answer>Rome</answer></think>\nParis", "Paris"),
        ("Rome</think>Paris", "Paris"),
        ("<think>Paris", ""),
        ("<think>a</think>b<think>Paris", ""),
        ("<answer>two\nlines</answer>", "two\nlines"),
    ],
)
def test_the_answer_is_what_is_tagged_or_follows_the_thoughts(text: str, answer: str) -> None:
    assert answer_of(text) == answer


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("The  Cat!", "cat"),
        ("U.S.A.", "usa"),
        ("1,000", "1000"),
        ("1,234,567.5", "1234567.5"),
        ("1,00,000", "100000"),
        ("1'000", "1000"),
        ("1990-95", "1990\N{EN DASH}95"),
        ("(3, 4)", "(3,4)"),
        ("3.14.", "3.14"),
        ("ＡＢＣ", "abc"),
        ("Straße", "STRASSE"),
        ("«Ça va»", "ça va"),
        ("\N{MINUS SIGN}5", "-5"),
        ("a", "A"),
    ],
)
def test_texts_that_differ_in_form_only_are_equal(text: str, same: str) -> None:
    assert normalize(text) == normalize(same)


@pytest.mark.parametrize(
    ("text", "other"),
    [
        *(("-5", "5"), ("1.5", "15"), (".5", "5"), ("+", "-"), ("the", "a"), ("1e-5", "1e5")),
        *((f"3{between}4", "34") for between in ("/", ":", "^", "*", "-", ",", ")(", "\N{EN DASH}")),
        *(("3/-4", "3/4"), ("(1,50)", "150"), ("1,2345", "12345")),
    ],
)
def test_texts_that_mean_something_else_are_not(text: str, other: str) -> None:
    assert normalize(text) != normalize(other)


@given(st.text())
def test_only_space_has_an_empty_normal_form(text: str) -> None:
    assert bool(normalize(text)) == bool(text.split())


def test_exact_pays_for_any_of_the_answers() -> None:
    row = {"answers": {"text": ["the Eiffel Tower", "Tour Eiffel"], "answer_start": [1, 2]}}
    assert score(exact, row, "Eiffel tower.", "tour eiffel", "Eiffel", "") == [1.0, 1.0, 0.0, 0.0]
    assert score(exact, {"answer": -5}, "-5", "5", "<answer>-5</answer>") == [1.0, 0.0, 1.0]
    # As tables have a number where another row has none.
    assert score(exact, {"answer": 42.0}, "42", "42.0", "4.2", "420") == [1.0, 1.0, 0.0, 0.0]


def test_f1_counts_common_words_for_the_best_answer() -> None:
    row = {"answer": ["the quick brown fox", "dog"]}
    # Of {quick, brown, fox}: two of two words, 2 x 2 / (2 + 3); one of three; all.
    assert score(f1_score, row, "quick fox", "a red fox runs", "Dog", "") == [0.8, 2 / 6, 1.0, 0.0]
    assert f1([], []) == 1.0 and f1(["a", "a"], ["a"]) == 2 / 3


@given(st.lists(st.sampled_from("abc")), st.lists(st.sampled_from("abc")))
def test_f1_is_a_share_symmetric_and_one_only_for_the_same_words(words: list[str], expected: list[str]) -> None:
    assert 0 <= f1(words, expected) == f1(expected, words) <= 1
    assert (f1(words, expected) == 1) == (sorted(words) == sorted(expected))


@pytest.mark.parametrize(
    "row", [{}, {"answer": None}, {"answer": []}, {"answer": " "}, {"answer": [None]}, {"answers": {"text": []}}]
)
def test_a_row_without_an_answer_is_named(row: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the row has no answer to compare with"):
        accepted_answers(row)
