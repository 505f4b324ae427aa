"""Responses as of a policy that repeats itself, or writes numbers that nothing can hold: scored in time, for all."""

import time
from typing import Any

import pytest

from async_rl.config.reward_section import RewardSection
from async_rl.method.types import Prompt
from async_rl.rollouts.rewards.function import load_function
from async_rl.rollouts.rewards.rubric import NUMBER
from tests.support.groups import text_responses

ROWS: dict[str, dict[str, Any]] = {
    "multiple_choice": {"answer": "B", "choices": ["x y", "foo", "bar", "baz"]},
    "f1": {"answer": "42"},
    "exact": {"answer": "42"},
    "math": {"answer": "42"},
}

RIGHT = {"multiple_choice": r"\boxed{B}", "f1": "42", "exact": "42", "math": r"\boxed{42}"}

LENGTH = 100_000

REPEATED = [
    "answer: ", "the answer is \n", "<answer>", "</answer>", "<answer></answer>", r"\boxed{", "(", "A B ", "1", " ",
    "<think>", "$x$ ", "}", "####",
]  # fmt: skip

HUGE = [r"\boxed{9^{9^{9}}}", r"\boxed{100000000!}", r"\boxed{(x+y+z)^{200}}", r"\boxed{" + "(" * 500 + ")" * 500 + "}"]


def seconds(name: str, texts: list[str], expected: list[float], timeout_s: float) -> float:
    """Of computing, whatever else the machine does."""
    function = load_function(RewardSection(name=name, timeout_s=timeout_s))
    # The first call loads what a parser needs, in the time of whichever response comes first.
    function(Prompt("row7", (1,), ROWS[name]), text_responses(RIGHT[name]), ROWS[name])
    begun_s = time.process_time()
    assert function(Prompt("row7", (1,), ROWS[name]), text_responses(*texts), ROWS[name]) == expected
    return time.process_time() - begun_s


@pytest.mark.parametrize("name", [name for name in ROWS if name != "math"])
@pytest.mark.parametrize("text", REPEATED)
def test_a_text_that_repeats_itself_is_scored_in_linear_time(name: str, text: str) -> None:
    # What takes quadratic time takes from ten seconds to ten minutes.
    assert seconds(name, [(text * LENGTH)[:LENGTH], RIGHT[name]], [0.0, 1.0], timeout_s=30) < 5


@pytest.mark.computes
@pytest.mark.parametrize("text", [*HUGE, *((text * LENGTH)[:LENGTH] for text in REPEATED)], ids=lambda text: text[:20])
def test_an_answer_that_cannot_be_computed_is_wrong_and_leaves_time_for_the_others(text: str) -> None:
    # A limit comes late while a number is multiplied, which cannot be interrupted.
    assert seconds("math", [text, RIGHT["math"], text], [0.0, 1.0, 0.0], timeout_s=6) < 9


@pytest.mark.parametrize("answer", [float("nan"), None, " "])
def test_an_answer_of_a_table_that_is_missing_is_named(answer: Any) -> None:
    function = load_function(RewardSection(name="math"))
    with pytest.raises(ValueError, match=r"the row has no 'answer'|is no mathematical expression"):
        function(Prompt("row7", (1,), {}), text_responses("1"), {"answer": answer})


@pytest.mark.parametrize("tail", ["a", ".", "", ".5a"])
def test_a_number_of_a_judge_is_found_in_linear_time(tail: str) -> None:
    begun_s = time.process_time()
    found = NUMBER.findall("1" * LENGTH + tail)
    # Milliseconds; in quadratic time it takes minutes.
    assert time.process_time() - begun_s < 2 and len(found) == (tail != "a")
