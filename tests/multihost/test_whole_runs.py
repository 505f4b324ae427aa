"""Whole runs on five hosts without a shared file system, over links of 1 Gbit/s with delay and loss.

Two hosts train, with a rank each, and three run instances. Each run is compared with the same run on one host, which
has the same number of training ranks.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.common.hosts import why_not
from benchmarks.common.link import why_no_link
from tests.support.programs import Programs
from tests.support.same_run import assert_same_run
from tests.support.several_hosts import SeveralHosts, on_one_host

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

SETTINGS = (
    # One response at a time, each of up to 160 tokens: a batch lasts, and a cut link interrupts responses.
    *("--train.order=prompt", "--inference.max_concurrency=1", "--rollout.max_response_tokens=160"),
    *("--pool.timeout_s=100", "--publish.timeout_s=10"),
    "--algorithm.kl_coef=0.05",
)
LOST_AFTER_S = 6.0
TORCHRUN_S = 4.0
"""Until torchrun has noticed that its rank has ended, and has ended, too."""


@pytest.fixture
def make(tmp_path: Path, tiny_model: Callable[..., Path], programs: Programs) -> Iterator[Callable[..., SeveralHosts]]:
    made: list[SeveralHosts] = []

    def make(*overrides: str) -> SeveralHosts:
        if (reason := why_not() or why_no_link()) is not None:
            pytest.skip(reason)
        made.append(SeveralHosts(tmp_path, tiny_model("qwen3", tied=True), programs, *overrides))
        return made[0]

    yield make
    for each in made:
        each.close()


def test_two_replicas_with_an_instance_that_joins_late_and_one_that_is_cut_off_for_a_while(
    make: Callable[..., SeveralHosts], tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    overrides = (*SETTINGS, "--train.iterations=4", "--reward.timeout_s=100")
    several = make(*overrides, f"--reward.name=python:{tmp_path}/disk/reward.py:gated")
    run, hosts = several.run, several.hosts
    hosts["late"].isolate("data")
    for name in ("late", "early", "cut"):
        several.start_instance(name)
    several.wait_for(lambda: "ready at" in several.said("early") and "ready at" in several.said("cut"))
    several.start_trainer()
    # Each of the first three batches ends when its gate is opened, so when what it is there for has happened.
    several.wait_for(several.has_begun)
    hosts["late"].reconnect("data")
    several.wait_for(lambda: "registered with the fleet" in several.said("late"))
    several.open_gate(0)
    several.wait_for_iterations(1)
    several.wait_for(lambda: several.instances()["cut"].num_requests)
    hosts["cut"].cut("data")
    several.wait_for(lambda: several.instances()["cut"].state == "dead")
    several.open_gate(1)
    several.wait_for_iterations(2)
    hosts["cut"].restore("data")
    several.wait_for(lambda: several.instances()["cut"].state != "dead")
    several.open_gate(2)
    several.open_gate(3)
    assert several.finish() == [0, 0], several.said()
    proofs = run.lines("ledger.jsonl")
    require_proven(proofs, 4)
    first, *_, last = (proof["logprob_gaps"]["instances"] for proof in proofs)
    # Whether the first batch had one or both of the early ones depends on which of them had registered by then.
    late = hosts["late"].addresses["data"]
    assert first and not any(late in url for url in first), (first, several.said())
    assert len(last) == 3, (last, several.said())
    several.close()
    assert_same_run(run, on_one_host(tmp_path / "one", tiny_model("qwen3", tied=True), overrides))


def test_a_cut_between_the_training_hosts_ends_both_in_time_and_the_run_resumes(
    make: Callable[..., SeveralHosts], tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    # Without a canary, whose many short passes take a minute where ranks of one layer are 20 ms apart.
    settings = ("--trainer.tensor_parallel=2", "--train.iterations=3", "--checkpoint.every=1", "--publish.canary=off")
    several = make(*SETTINGS, *settings, f"--trainer.lost_after_s={LOST_AFTER_S}")
    for name in ("early", "late"):
        several.start_instance(name)
    several.start_trainer()
    several.wait_for_iterations(1)
    several.hosts["node-2"].cut("data")
    cut_s = time.monotonic()
    assert several.finish() == [1, 1]
    assert time.monotonic() - cut_s < LOST_AFTER_S + TORCHRUN_S, several.said()
    assert "RankLost: nothing was heard of training rank 1" in several.said("node-1"), several.said()
    assert "RankLost: training rank 1 has not reached the store" in several.said("node-2"), several.said()
    several.hosts["node-2"].restore("data")
    several.start_trainer()
    assert several.finish() == [0, 0], several.said()
    require_proven(several.run.lines("ledger.jsonl"), 3)
    several.close()
    expected = on_one_host(tmp_path / "one", tiny_model("qwen3", tied=True), (*SETTINGS, *settings))
    assert_same_run(several.run, expected)


def test_the_stages_of_two_hosts_send_their_own_weights(
    make: Callable[..., SeveralHosts], tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    # Without a canary, whose many short passes take a minute where stages are 20 ms apart.
    settings = (*SETTINGS, "--trainer.pipeline_parallel=2", "--train.iterations=3", "--publish.canary=off")
    several = make(*settings, "--publish.transport=stages")
    for name in ("early", "late"):
        several.start_instance(name)
    several.start_trainer()
    assert several.finish() == [0, 0], several.said()
    require_proven(several.run.lines("ledger.jsonl"), 3)
    several.close()
    expected = on_one_host(tmp_path / "one", tiny_model("qwen3", tied=True), settings)
    assert_same_run(several.run, expected, but=("fingerprint",))


def require_proven(proofs: list[dict[str, object]], num_iterations: int) -> None:
    assert [proof["iteration"] for proof in proofs] == list(range(num_iterations))
    assert all(proof["on_policy"] and proof["num_responses"] == 24 for proof in proofs), proofs
    assert len({proof["fingerprint"] for proof in proofs}) == num_iterations, "every step changes the weights"
