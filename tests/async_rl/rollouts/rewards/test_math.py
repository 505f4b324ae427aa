"""The reward `math`: final answers in the forms that rows and policies give them."""

import random
import time

import pytest

from async_rl.config.reward_section import RewardSection
from async_rl.method.types import Prompt
from async_rl.rollouts.rewards.function import RewardFunction, load_function
from async_rl.rollouts.rewards.math import is_number, is_part
from tests.support.groups import text_responses

GIVEN = [
    ("12", "\\boxed{12}. Check: 12 - 3 = 9"),
    ("12", "The answer is 12. Indeed 12 / 4 is 3"),
    ("12", "The answer is 12!"),
    ("12", "In the end, after 5, 12"),
    ("12", "Put it in <answer></answer>. \\boxed{12}"),
    ("5 #### ", "5"),
    ("$x", "$x$"),
    ("12", r"\boxed{12}"),
    ("12", "9 + 3 = 12"),
    ("12", "The answer is 12."),
    ("12", "so $x = 12$"),
    ("12", "$12$ apples"),
    ("12", "12"),
    ("1234", "1,234"),
    ("1234", "$1{,}234$"),
    ("1234", "The total is $1,234.00"),
    ("0.5", "50%"),
    ("1/2", r"\boxed{50\%}"),
    ("300000000", r"$3 \times 10^8$"),
    ("300000000", r"\boxed{3 \cdot 10^{8}}"),
    ("1/2", r"$\frac{1}{2}$"),
    ("0.5", "1/2"),
    ("-1/2", r"$-\frac12$"),
    ("18.90", r"\boxed{\$18.90}"),
    ("18.9", "It costs $18.90"),
    ("7/2", r"$3\frac{1}{2}$"),
    ("12", "12 dollars"),
    ("13", "I think 12 or 13"),
    ("12", "9+3 is 12"),
    ("3", "5 - 2 = 3."),
    ("27", "Answer: 9 × 3 = 27"),
    ("12", "#### 12"),
    ("12", "**12**"),
    ("12", "12."),
    ("12", "12.0"),
    ("12", r"\boxed{\text{12}}"),
    ("12", r"\boxed{12\text{ cm}}"),
    ("12", r"\boxed{12^\circ}"),
    ("9+3", "9 + 3"),
    (r"2\sqrt{3}", r"$\sqrt{12}$"),
    (r"2\sqrt{3}", r"\boxed{2\sqrt{3}}"),
    ("x^2+1", "$1+x^2$"),
    ("(3,4)", "$(3, 4)$"),
    (r"\frac{\pi}{2}", r"\boxed{\frac{\pi}{2}}"),
    ("5 - 2", r"\boxed{3}"),
    ("-5", "The answer is -5."),
    ("-5", "x = -5"),
    ("12", "<think>9+3</think>The answer is 12"),
    ("12", r"The final answer is $\boxed{12}$."),
    ("12", "12 cm^2"),
    ("12", r"\boxed{12 \text{ cm}^2}"),
    ("60", r"\boxed{60^{\circ}}"),
    ("0.75", r"\boxed{\frac{3}{4}}"),
    ("0.75", r"\boxed{\dfrac{6}{8}}"),
    ("10", r"$\frac{20}{2}$"),
    ("42", "The answer is $42$, since 40 + 2 = 42"),
    ("42", "40 + 2 = 42, so 42."),
    ("12", "24 / 2"),
    (r"\frac{3}{4}", "3/4"),
    (r"\$18.90", "18.90"),
    (r"\$32,\!348", "32348"),
    (r"\$32,\!348", r"\boxed{\$32,348}"),
    ("5 #### 7", "7"),
    ("halves #### 0.5", "1/2"),
    (r"12 \text{ cm}", r"\boxed{12}"),
    ("$12$", "12"),
    (r"\boxed{12}", "12"),
    (r"50\%", r"\boxed{50\%}"),
    ("50%", "50%"),
    ("1,234", "1234"),
    ("12", "Answer: 12"),
    ("12", "So, 12"),
    ("12", "I get\n- 12"),
    ("12", "Answer: 12\n- checked"),
    ("12", "**Answer:** 12"),
    ("12", "Therefore: $12$"),
    ("12", r"Final answer: \(12\)"),
    ("12", r"\[12\]"),
    ("12", "<answer>12</answer>"),
    ("12", "$x=12$ and 3 checks: $12$"),
    ("72", "Natalia sold 48/2 = 24, and 48+24 = 72 clips altogether.\n#### 72"),
    ("0.1", "1/10"),
    (r"\text{12}", "12"),
    ("2.5", "2.50"),
    ("1000000", "1,000,000"),
    ("12", r"$\frac{24}{2}$"),
    ("144", "12*12 = 144"),
]
"""A row's answer, and a response that gives it: as the graders of MATH, Minerva, GSM8K and math-verify read it."""

NOT_GIVEN = [
    ("12", "To find 9 + 3,"),
    ("31", "15 + 16 = "),
    ("12", "9 + 3"),
    ("12", "We compute 9+3 first."),
    ("12", r"\boxed{9+3}"),
    ("8", "2^3"),
    ("8", r"\boxed{2^3}"),
    ("2", r"$\sqrt{4}$"),
    ("12", r"\boxed{12 = 9+3}"),
    ("12", "12 = 9 + 3"),
    ("-3", "2 - 5"),
    ("7", "10-3"),
    ("27", "9*3"),
    ("3", "9 × 3"),
    ("27", "9 × 3"),
    ("6", r"$\binom{4}{2}$"),
    ("1", "2/3 + 1/3"),
    ("5", "5!"),
    ("120", "5!"),
    ("4", "(3, 4)"),
    ("3", r"3\pi"),
    ("100000000", r"3 \times 10^8"),
    ("5", "x = -5"),
    ("5", r"\boxed{-5}"),
    ("12", r"\boxed{13}"),
    ("12", "I do not know"),
    ("3.5", "3 1/2"),
    ("1", "3 1/2"),
    ("5", "3:5"),
    ("3", "3:5"),
    ("12", "x = 9+3"),
    ("12", "It is 3 * 4."),
    ("72", "48+24"),
    ("72", "She sold 48+24 clips."),
    ("0.1", "$10^{-1}$"),
    ("12", "twelve"),
    ("144", "12^2"),
]
"""A row's answer, and a response whose last expression has its value, or one that is wrong."""


@pytest.fixture(scope="module")
def score() -> RewardFunction:
    return load_function(RewardSection(name="math"))


@pytest.mark.parametrize(("answer", "text"), GIVEN)
def test_an_answer_that_is_given_counts(score: RewardFunction, answer: str, text: str) -> None:
    assert score(Prompt("row7", (1,), {}), text_responses(text), {"answer": answer}) == [1.0]


@pytest.mark.parametrize(("answer", "text"), NOT_GIVEN)
def test_a_computation_that_only_equals_the_answer_does_not(score: RewardFunction, answer: str, text: str) -> None:
    assert score(Prompt("row7", (1,), {}), text_responses(text), {"answer": answer}) == [0.0]


@pytest.mark.parametrize("answer", ["1/2", "$\\frac{1}{2}$", "halves of one\n#### 0.5", 0.5])
def test_math_compares_final_answers_mathematically(answer: object) -> None:
    texts = ("it is \\boxed{\\frac{2}{4}}", "the answer is 0.5", "\\boxed{2}", "I do not know")
    row = {"answer": answer}
    score = load_function(RewardSection(name="math"))
    assert score(Prompt("row7", (1,), row), text_responses(*texts), row) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("seed", range(20))
def test_no_computation_counts_until_its_result_is_said(score: RewardFunction, seed: int) -> None:
    rng = random.Random(seed)
    a, b = rng.randrange(2, 90), rng.randrange(2, 90)
    sign, result = rng.choice([("+", a + b), ("-", a - b), ("*", a * b), ("\\times", a * b), ("\\cdot", a * b)])
    task = rng.choice([f"{a} {sign} {b}", f"{a}{sign} {b}", f"({a}) {sign} {b}"])
    forms = ("{}", "${}$", "\\boxed{{{}}}", "The answer is {}", "We compute {} first.", "\\[ {} \\]", "{} =", "= ${}$.")
    given = [f"{task} = {result}", f"${task} = {result}$", f"{task} is \\boxed{{{result}}}"]
    texts = [*(form.format(task) for form in forms), *given]
    rewards = score(Prompt("row7", (1,), {}), text_responses(*texts), {"answer": str(result)})
    assert rewards == [0.0] * len(forms) + [1.0] * len(given), dict(zip(texts, rewards, strict=True))


def test_a_long_text_costs_no_time(score: RewardFunction) -> None:
    begun_s = time.process_time()
    assert not is_number("1" + " a" * 100_000 + "#") and not is_part("1", "1" * 100_000 + " 1")
    assert time.process_time() - begun_s < 5
