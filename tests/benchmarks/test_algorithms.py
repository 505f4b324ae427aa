"""The benchmark of algorithms trains each from the same base model, and reports what it ended with."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.algorithms import Outcome, Results, run, table


@pytest.mark.distributed
def test_an_algorithm_trains_from_the_base_model_and_the_distillation_from_what_grpo_made(tmp_path: Path) -> None:
    names = ["distillation"]
    program = [sys.executable, "-m", "deploy.quickstart.warm_start", "--seed", "3", "--max-steps", "2"]
    subprocess.run([*program, "--run-dir", str(tmp_path / "seed_3")], check=True)
    small = ["--train.iterations=1", "--prompts.prompts_per_batch=4"]
    (results,) = run(tmp_path, names, [3], small).values()
    assert list(results.outcomes) == names
    for outcome in results.outcomes.values():
        assert 0 <= outcome.accuracy < 0.1 and outcome.reward_first == outcome.reward_last == outcome.reward_lowest
    made = {path.parent.name for path in tmp_path.glob("seed_3/*/model")}
    assert made == {"grpo", *names}


def test_an_algorithm_that_ends_no_better_than_it_began_is_named() -> None:
    better, worse = Outcome(0.5, 0.4, 0.6, 0.4), Outcome(0.3, 0.4, 0.2, 0.1)
    results = Results(0.3, {"grpo": better, "gspo": worse})
    assert results.worse == ["gspo"]
    assert table({7: results}).splitlines() == [
        "| `algorithm.name` | seed 7, from 0.300 | reward |",
        "|---|---|---|",
        "| `grpo` | 0.500 | 0.40 → 0.60 |",
        "| `gspo` | 0.300 | 0.40 → 0.20 |",
    ]
