"""Which choice a response gives, in all the ways in which models say so; and which one a row calls right."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.method.types import Prompt
from async_rl.rollouts.rewards.multiple_choice import choices_of, chosen, right_choice, score
from tests.support.groups import text_responses

CITIES = {"A": "Paris", "B": "London", "C": "A great man", "D": "42"}


@pytest.mark.parametrize(
    ("text", "label"),
    [
        *((text, "B") for text in ("B", "b", "(B)", "b.", "[B]", "**B**", "B) London", "London", " london.\n")),
        ("Answer: B", "B"),
        ("**Answer:** (B)", "B"),
        ("Answer:\nB", "B"),
        ("ANSWER = B because of the Thames", "B"),
        ("The correct answer to this question is (B).", "B"),
        ("the answer is not A, the answer is B", "B"),
        ("Answer: A. No, answer: B", "B"),
        ("answer: **B**\nthat was the answer", "B"),
        ("so \\boxed{B}", "B"),
        ("$\\boxed{\\text{(B)}}$", "B"),
        ("\\boxed{A} or rather \\boxed{\\mathbf{B}}", "B"),
        ("\\boxed{B. London}", "B"),
        ("Answer: A\n<answer>B</answer>", "B"),
        ("<answer> London </answer>", "B"),
        ("So I pick (B)", "B"),
        ("(A) is wrong.\nIt is (B).", "B"),
        ("<think>Answer: A</think> Answer: B", "B"),
        *((text, "B") for text in ("b) London", "Answer: b) London", "Option B", "The answer is option (B).")),
        *((text, None) for text in ("a friend", "i.e. London", "Answer: i.e. that", "An option Bob has", "b.c")),
        *(
            (text, "B")
            for text in ("The answer is option b", "option b", "Option B: London", "Option B because A is small")
        ),
        ("Option A is wrong. Option B is wrong too, so it must be C", None),
        ("Option A is wrong, so C", None),
        ("a) First, consider England.\nb) It is an island.\nAnswer D", None),
        ("Answer: A great man", "C"),
        ("Answer: 42", "D"),
        ("\\boxed{x = 3}", None),
        ("Answer: E", None),
        ("The answer is a matter of taste", None),
        ("A man walked by", None),
        ("I think (A) or (B)", None),
        ("I like London", None),
        ("<think>Answer: B", None),
        ("", None),
    ],
)
def test_the_choice_of_a_response(text: str, label: str | None) -> None:
    assert chosen(text, CITIES) == label


@pytest.mark.parametrize(
    ("row", "label"),
    [
        ({"answer": "B"}, "B"),
        ({"answer": "(b)"}, "B"),
        ({"answer": 1, "choices": ["x", "y"]}, "B"),
        ({"answer": "y", "options": ["x", "y"]}, "B"),
        ({"answer": "2", "choices": ["1", "2"]}, "B"),
        ({"answerKey": "2", "choices": {"label": ["1", "2"], "text": ["x", "y"]}}, "2"),
        ({"answer": "B", "options": {"A": "x", "B": "y"}}, "B"),
    ],
)
def test_the_right_choice_of_a_row(row: dict[str, Any], label: str) -> None:
    assert right_choice(row, choices_of(row)) == label


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "the row's answer is None: expected one of A, B"),
        ({"answer": "Paris"}, "the row's answer is 'Paris'"),
        ({"answer": 1}, "the row's answer is 1:"),
        ({"answer": 2, "choices": ["x", "y"]}, "the row's answer is 2: expected one of A, B in"),
        ({"answer": "x", "choices": ["x", "X"]}, "the row's answer is 'x'"),
        ({"answer": "A", "choices": "xy"}, "the row's choices are 'xy': expected a list"),
        ({"answer": "A", "choices": ["x"]}, "the row's choices are"),
        ({"answer": "A", "choices": {}}, "the row's choices are"),
        ({"answer": "A", "choices": ["x"] * 27}, "the row's choices are"),
    ],
)
def test_a_row_that_says_no_choice_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score(Prompt("row7", (1,), row), [], row)


def test_only_the_right_choice_is_paid() -> None:
    row = {"answer": 1, "choices": ["Paris", "London"]}
    responses = text_responses("B", "Answer: A", "London", "C")
    assert score(Prompt("row7", (1,), row), responses, row) == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "text", ["B", "b", "(B)", "Answer: B", "Answer: (b)", "\\boxed{B}", "<answer>b</answer>", "B. y"]
)
@pytest.mark.parametrize("labels", ["ABC", "abc"])
def test_labels_of_a_row_may_be_small_or_capital_letters(text: str, labels: str) -> None:
    row = {"answer": labels[1], "choices": dict(zip(labels, "xyz", strict=True))}
    assert score(Prompt("row7", (1,), row), text_responses(text), row) == [1.0]


@given(st.text(alphabet=" \n().:ABCDanswer is\\boxed{}<>/*thkx1", max_size=60))
def test_any_text_gives_a_label_or_none(text: str) -> None:
    assert chosen(text, CITIES) in {*CITIES, None}
