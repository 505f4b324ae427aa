"""1 for a response whose final answer equals the row's `answer` mathematically, else 0, by math-verify."""

from collections.abc import Mapping, Sequence
from typing import Any

from math_verify import parse, verify

from async_rl.rewards.base import correct_at
from async_rl.types import Prompt, Response


@correct_at(1.0)
def score(prompt: Prompt, responses: Sequence[Response], row: Mapping[str, Any]) -> list[float]:
    """`row["answer"]`: an expression, plain or in LaTeX, with or without `$` or `\\boxed`; or GSM8K's `... #### 42`."""
    if row.get("answer") is None:
        raise ValueError(f"the row has no 'answer' (it has {sorted(row)}): the math reward compares with it")
    gold = str(row["answer"]).rpartition("####")[2].strip()
    # The parser finds expressions only in mathematical delimiters.
    parsed = parse(gold if "$" in gold or "\\boxed" in gold else f"\\boxed{{{gold}}}")
    if not parsed:
        raise ValueError(f"the row's answer {row['answer']!r:.200} is no mathematical expression")
    return [float(verify(parsed, parse(response.text))) for response in responses]
