"""Tasks of reasoning-gym score what a policy wrote: none of it is run or takes too long, right answers stay right."""

import time
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.reward_section import RewardSection
from async_rl.method.types import Prompt
from async_rl.rollouts.rewards.function import load_function
from async_rl.rollouts.rewards.reasoning_gym import FORMULAS, LITERALS, is_formula
from tests.support.groups import text_responses

reasoning_gym = pytest.importorskip("reasoning_gym")

EVALUATING = [*FORMULAS, *(module.rpartition(".")[2] for module in LITERALS)]


def rows(task: str, num_rows: int = 3) -> list[dict[str, Any]]:
    return list(reasoning_gym.create_dataset(task, seed=3, size=num_rows))


def score(row: dict[str, Any], *answers: str, timeout_s: float = 30.0) -> list[float]:
    function = load_function(RewardSection(name="reasoning_gym", timeout_s=timeout_s))
    rewards: list[float] = function(Prompt("row7", (1,), row), text_responses(*answers), row)
    return rewards


@pytest.mark.parametrize("task", EVALUATING)
def test_an_answer_is_not_run_and_gets_what_an_unreadable_one_gets(task: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    codes = [f"open({str(mark)!r}, 'w')", f"[[open({str(mark)!r}, 'w')]]", f"5!+0*open({str(mark)!r}, 'w').fileno()"]
    unreadable, *rewards = score(rows(task, 1)[0], "(", *codes, *(f"<answer>{code}</answer>" for code in codes))
    assert not mark.exists() and set(rewards) == {unreadable} and unreadable < 0.1


@pytest.mark.parametrize("task", EVALUATING)
def test_right_answers_are_right(task: str) -> None:
    # Some rows have none, or the task itself, `Integral(...)`, which is no answer.
    solved = [row for row in rows(task) if row["answer"] and "Integral" not in row["answer"]]
    assert [score(row, row["answer"], f"So:\n<answer> {row['answer']}\n</answer>") for row in solved] == [
        [1.0, 1.0] for _ in solved
    ]


def test_the_task_scores_a_row_of_its_own_or_one_that_names_it() -> None:
    row: dict[str, Any] = {"question": "q", "answer": "tac", "metadata": {"source_dataset": "spell_backward"}}
    answers = ("tac", " TAC\n", "xyz", "so: <answer>no</answer><answer>tac</answer>")
    assert score(row, *answers) == [1.0, 1.0, 0.0, 1.0]
    row |= {"task": "spell_backward", "task_options": {"seed": 1, "min_word_len": 4}}
    assert score(row, "tac") == [1.0]


def test_lists_that_are_read_count_as_they_did() -> None:
    (row,) = rows("spiral_matrix", 1)
    assert score(row, str(row["answer"].split()), "[1, 2", "") == [0.1, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        *(
            (text, True)
            for text in ("(1+2)*3 - 4/5", "x**2/2 + C", "exp(2*x)*sin(x)", ".5e3*x", "5!", "", "x^2", "(1, 2")
        ),
        *(
            (text, False)
            for text in ("x.diff", "x .diff", "1..real", "2.real", "sin.x", "x[0]", "'a'", "a_b", "lambda: 1")
        ),
        *((text, False) for text in ("eval(x)", "open(0)", "chr(9)", "\N{VULGAR FRACTION ONE HALF}", "sin\u00a0(x)")),
    ],
)
def test_a_formula_has_numbers_operators_and_names_of_mathematics(text: str, is_one: bool) -> None:
    assert is_formula(text) is is_one


def test_an_answer_that_cannot_be_computed_is_wrong_and_leaves_time_for_the_others() -> None:
    (row,) = rows("countdown", 1)
    begun_s = time.process_time()
    huge, right = score(row, "9**9**9**9", row["answer"], timeout_s=4.0)
    assert (huge, right) == (0.0, 1.0) and time.process_time() - begun_s < 8


@pytest.mark.parametrize("task", ["prime_factorization", "game_of_life", "coin_flip", "boxnet"])
@pytest.mark.parametrize("answer", ["no idea", "{}", "1e999", "[1]", ""])
def test_an_answer_at_which_a_task_raises_is_wrong(task: str, answer: str) -> None:
    assert score(rows(task, 1)[0], answer)[0] < 0.5


def test_a_row_that_its_task_cannot_read_is_an_error() -> None:
    with pytest.raises(KeyError, match="answer"):
        score({"task": "prime_factorization", "metadata": {}}, "2")


def test_repeated_tags_are_scored_in_linear_time() -> None:
    (row,) = rows("spell_backward", 1)
    begun_s = time.process_time()
    # In quadratic time it takes more than a minute.
    assert score(row, "<answer>" * 50_000, row["answer"]) == [0.0, 1.0]
    assert time.process_time() - begun_s < 5
