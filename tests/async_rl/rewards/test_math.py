"""The reward `math`: final answers in the forms that rows and policies give them."""

import pytest

from async_rl.config.reward_section import RewardSection
from async_rl.rewards.function import load_function
from async_rl.types import Prompt
from tests.support.groups import text_responses


@pytest.mark.parametrize("answer", ["1/2", "$\\frac{1}{2}$", "halves of one\n#### 0.5", 0.5])
def test_math_compares_final_answers_mathematically(answer: object) -> None:
    texts = ("it is \\boxed{\\frac{2}{4}}", "the answer is 0.5", "\\boxed{2}", "I do not know")
    row = {"answer": answer}
    score = load_function(RewardSection(name="math"))
    assert score(Prompt("row7", (1,), row), text_responses(*texts), row) == [1.0, 1.0, 0.0, 0.0]
