"""A run whose length is given in epochs: it draws every row so many times, also when it resumes with more of them."""

import json
from collections import Counter
from collections.abc import Callable

import pytest

from async_rl.method.proof.prompt_ids import from_runs
from tests.support.local_run import Run

pytestmark = [pytest.mark.distributed, pytest.mark.nightly]

NUM_ROWS = 40
SETTINGS = ("--prompts.prompts_per_batch=20", "--rollout.max_response_tokens=4", "--checkpoint.every=2")
DECAY = ("--optimizer.schedule=linear", "--optimizer.min_learning_rate_ratio=0")


def test_every_row_is_trained_once_per_epoch_and_more_epochs_go_on(new_run: Callable[..., Run]) -> None:
    run = new_run("epochs")
    run.config.write_text(run.config.read_text().replace("iterations = 3", "epochs = 1"))
    run.train(*SETTINGS, *DECAY)
    assert trained(run) == dict.fromkeys(map(str, range(NUM_ROWS)), 1)
    assert "the run is trained: 2 iterations, train.epochs = 1" in run.output.read_text()
    rates = [record["learning_rate"] for record in run.lines("metrics.jsonl")]
    assert [record["iterations"] for record in run.lines("metrics.jsonl")] == [2, 2]
    assert rates[-1] < rates[0], "the schedule has the number of iterations"
    settings = json.loads((run.dir / "config.json").read_text())["train"]
    assert (settings["epochs"], settings["iterations"]) == (1, 2)

    run.train(*SETTINGS, *DECAY, "--run.resume=true", "--train.epochs=1.5")
    assert Counter(trained(run).values()) == {1: NUM_ROWS // 2, 2: NUM_ROWS // 2}
    assert run.lines("metrics.jsonl")[-1]["iterations"] == 3
    run.train(*SETTINGS, *DECAY, "--run.resume=true", "--train.epochs=1.5")
    assert "is finished: all 3 iterations, train.epochs = 1.5 are trained" in run.output.read_text()


def trained(run: Run) -> dict[str, int]:
    """How often each prompt was trained, by the proofs."""
    return Counter(prompt_id for proof in run.lines("ledger.jsonl") for prompt_id in from_runs(proof["prompt_ids"]))
