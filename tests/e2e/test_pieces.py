"""Whole runs whose long groups are trained in pieces, on two replicas: proven, whatever was lost amid them."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.test_router_replay import SETTINGS as NEAR_TIES
from tests.e2e.test_router_replay import SIZES
from tests.support.local_run import Run
from tests.support.same_run import SETTINGS, assert_same_run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

LONG = ("--trainer.micro_batch_tokens=40", "--trainer.num_processes=2", "--prompts.prompts_per_batch=5")
"""Four responses of up to 24 tokens, and a prompt of about nine, do not fit; two replicas have not as many groups."""


def num_cut(run: Run) -> int:
    return sum(row.get("num_pieces", 1) > 1 for row in run.lines("timeline.jsonl"))


def assert_proven(run: Run, num_iterations: int) -> None:
    proofs: Sequence[dict[str, Any]] = run.lines("ledger.jsonl")
    assert [proof["iteration"] for proof in proofs] == list(range(num_iterations))
    assert all(proof["on_policy"] and proof["num_groups"] == 5 and proof["num_responses"] == 20 for proof in proofs)
    assert num_cut(run) > 0


@pytest.mark.nightly
def test_a_run_trains_long_groups_in_pieces_as_they_finish(new_run: Callable[..., Run]) -> None:
    run = new_run("pieces").train(*LONG, "--train.iterations=3")
    assert_proven(run, 3)


def lose_the_producer_amid_pieces(run: Run, *settings: str) -> list[psutil.Process]:
    """Starts it; returns its ranks when two iterations are trained, and each reward of the third one waits."""
    run.let(0)
    run.start(*settings, "--trainer.lost_after_s=60")
    run.wait_for_calls(1)
    ranks = run.ranks()
    # All groups of the first iteration finish; one replica trains its pieces, the other one does not.
    ranks[-1].suspend()
    run.let(4)
    run.wait_for_calls(4)
    time.sleep(3)
    run.producer().kill()
    run.let(5 + 5)
    ranks[-1].resume()
    run.wait_for_iterations(2)
    notices = [notice["text"] for notice in run.lines("logs/notices.jsonl")]
    assert sum("iteration 0 begins anew" in text for text in notices) == 1
    return ranks


@pytest.mark.nightly
def test_in_prompt_order_a_producer_and_a_trainer_that_are_lost_amid_pieces_change_nothing(
    new_run: Callable[..., Run], reproducible_products: None
) -> None:
    settings = (*SETTINGS, *LONG, "--train.iterations=6", "--train.exact=true")
    undisturbed = new_run("undisturbed").train(*settings)
    assert_proven(undisturbed, 6)

    run = new_run("disturbed")
    ranks = lose_the_producer_amid_pieces(run, *settings)
    run.wait_for_calls(5 + 5 + 1)
    assert run.ranks() == ranks, "they keep their weights"
    run.kill_trainer()
    run.wait_until(lambda: run.restarts()["trainer"] == 1)
    run.tell("")
    assert run.process is not None and run.process.wait(600) == 0
    assert_proven(run, 6)
    assert_same_run(run, undisturbed, num_unsampled=0)
    assert num_cut(run) == num_cut(undisturbed) and not [p for p in ranks if psutil.pid_exists(p.pid)]


@pytest.mark.nightly
def test_pieces_whose_producer_is_lost_are_trained_along_the_routes_of_their_engine(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    """The routes are those of the responses that another producer got."""
    settings = (*LONG, *NEAR_TIES, "--train.iterations=3")
    model = tiny_model("qwen3_moe", **SIZES)
    for name in ("own", "replayed"):
        (tmp_path / name).mkdir()
    own, replayed = Run(tmp_path / "own", model), Run(tmp_path / "replayed", model)
    own.train(*settings)
    lose_the_producer_amid_pieces(replayed, *settings, "--train.router_replay=true")
    replayed.tell("")
    assert replayed.finish() == 0, replayed.everything_said()
    rms = []
    for run in (own, replayed):
        assert_proven(run, 3)
        rms.append([proof["logprob_gaps"]["rms"] for proof in run.lines("ledger.jsonl")])
    assert max(rms[1]) < 0.5 * min(rms[0]), rms
