"""`async-rl verify` on real parts: a sound set-up holds in every check, and each broken instance is named."""

import re
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.broken_instance import ALONE_FAULTS, MERGED_FAULTS, broken_python, faults_by_url
from tests.support.local_run import Run, command_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


def test_a_sound_set_up_holds_in_every_check_and_leaves_no_process(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    run = Run(tmp_path, tiny_model("qwen3", tied=True))
    # Two instances share 24 groups: each has the tokens that a judgement needs.
    code, report, said = run.verify("--prompts.prompts_per_batch=24", "--train.order=prompt")
    assert code == 0 and report["holds"], said
    outcomes = {(f["check"], f["subject"]): f["outcome"] for f in report["findings"]}
    assert set(outcomes.values()) == {"holds"}, said
    assert {check for check, _ in outcomes} == {
        *("loading canary", "log-probs", "sampling", "on-policy proof"),
        *("gradient norms", "losses", "weights", "resume after kill -9", "one instance lost"),
    }
    assert {subject for _, subject in outcomes} == {None, *report["instances"]}
    bounds = {f["check"]: f["bound"] for f in report["findings"]}
    exact = ("gradient norms", "losses", "weights", "resume after kill -9", "one instance lost")
    assert {bounds[check] for check in exact} == {"equal bit for bit"}, said
    assert not [p for p in psutil.process_iter() if str(tmp_path) in " ".join(command_of(p))]


EXPECTED = {
    "temperature": ("log-probs", "wrong temperature"),
    "weights": ("log-probs", "other weights"),
    "dtype": ("log-probs", "other dtype"),
    "head": ("loading canary", "stale head"),
}


@pytest.mark.nightly
def test_each_broken_instance_is_named_by_its_fault_also_by_two_replicas(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    run = Run(tmp_path, tiny_model("qwen3", tied=True))
    python = broken_python(tmp_path / "broken", list(EXPECTED))
    code, report, said = run.verify(
        *("--quick", "--iterations=1", f"--inference.python={python}", f"--inference.num_instances={len(EXPECTED)}"),
        *("--prompts.prompts_per_batch=40", "--rollout.responses_per_prompt=5", "--trainer.num_processes=2"),
    )
    assert code == 1 and not report["holds"], said
    causes: dict[str, set[tuple[str, str]]] = {}
    for finding in report["findings"]:
        if finding["outcome"] == "fails":
            causes.setdefault(finding["subject"], set()).add((finding["check"], finding["cause"]))
    faults = faults_by_url(tmp_path / "broken")
    assert set(faults.values()) == set(EXPECTED) and causes.keys() == faults.keys(), said
    for url, fault in faults.items():
        assert EXPECTED[fault] in causes[url], (fault, said)
        assert {cause for _, cause in causes[url]} == {EXPECTED[fault][1]}, (fault, said)
    untested = {f["check"] for f in report["findings"] if f["outcome"] == "not tested" and f["subject"] is None}
    assert {"gradient norms", "weights", "one instance lost"} <= untested


AT_ONCE = 3
"""Faulty instances beside a sound one."""

BATCHES = [
    faults[number : number + AT_ONCE]
    for faults in (list(ALONE_FAULTS), list(MERGED_FAULTS))
    for number in range(0, len(faults), AT_ONCE)
]
PUBLISH = {"alone": "adapters", "merged": "merged"}
CAUSES_OF = {
    "alone": r"adapters: .*|other weights",
    "merged": r"stale .*|wrong .*|other weights",
}


@pytest.mark.nightly
@pytest.mark.parametrize("planted", BATCHES, ids=lambda planted: planted[0])
def test_each_instance_that_computes_otherwise_with_adapters_is_named_before_its_first_token_is_trained(
    planted: list[str], tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    run = Run(tmp_path, tiny_model("qwen3", tied=True))
    form = planted[0].partition(": ")[0]
    python = broken_python(tmp_path / "broken", ["", *planted])
    code, report, said = run.verify(
        *("--quick", "--iterations=1", f"--inference.python={python}", f"--inference.num_instances={AT_ONCE + 1}"),
        *("--adapter.rank=4", "--adapter.alpha=8", f"--adapter.publish={PUBLISH[form]}"),
    )
    assert code == 1, said
    of_url = faults_by_url(tmp_path / "broken")
    assert set(of_url.values()) == {"", *planted}, said
    failed = {f["subject"]: f["cause"] for f in report["findings"] if f["check"] == "loading canary"}
    print({of_url[url]: cause for url, cause in failed.items()})
    assert failed.keys() == {url for url, fault in of_url.items() if fault}, said
    for url, cause in failed.items():
        assert re.fullmatch(CAUSES_OF[form], cause or ""), (of_url[url], cause, said)
    trained = run.dir.with_name("verified") / "periodic" / "ledger.jsonl"
    assert not trained.exists() or not trained.read_text(), "no step was taken on any of it"
