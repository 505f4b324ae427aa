import json
from pathlib import Path
from typing import Any

import pytest

from deploy.quickstart.kind import KINDS
from deploy.quickstart.report import is_on_policy, render, summarize, summary_rows
from tests.support.parts import needs_part

SPELLING = KINDS["spelling"]
ITERATIONS = 12


@pytest.fixture
def metrics() -> list[dict[str, Any]]:
    return [
        {
            "iteration": i,
            "iterations": ITERATIONS,
            "seconds": 2.0,
            "wait_s": 0.4,
            "train_s": 1.2,
            "publish_s": 0.1,
            "publish_bytes": 19_500_000,
            "step_s": 0.1,
            "reward_mean": i / ITERATIONS,
            "accuracy": i / (2 * ITERATIONS),
            "prompt_tokens": 100,
            "response_tokens": 900,
        }
        for i in range(ITERATIONS)
    ]


@pytest.fixture
def ledger() -> list[dict[str, Any]]:
    return [
        {
            "iteration": i,
            "weight_version": f"r-{i}",
            "on_policy": True,
            "num_responses": 48,
            "max_logprob_gap": 1e-6 * i,
        }
        for i in range(ITERATIONS)
    ]


def evaluation(accuracy: float, response: str | None) -> dict[str, Any]:
    sample = {"question": "<sun>", "answer": "nus", "response": response, "correct": response == "nus"}
    return {"accuracy": accuracy, "num_prompts": 500, "samples": [sample]}


@pytest.fixture
def summary(metrics: list[dict[str, Any]], ledger: list[dict[str, Any]]) -> dict[str, Any]:
    return summarize(
        metrics,
        ledger,
        evaluation(0.3, None),
        evaluation(0.8, "nus"),
        task="spelling",
        engine="vllm",
        seed=5,
        phases_s={"warm start": 20.0, "training": 24.0},
        cores={"instance-0": (0,), "trainer": (1,)},
    )


@needs_part("dashboard")
def test_the_report_is_the_page_of_the_run_below_what_was_measured_before_and_after(
    tmp_path: Path, summary: dict[str, Any], metrics: list[dict[str, Any]]
) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metrics))
    for proven, said in ((True, "yes, gap 1.1e-05"), (False, "NO, gap")):
        shown = {**summary, "on_policy": proven}
        page = render(SPELLING, shown, tmp_path, evaluation(0.3, None), evaluation(0.8, "nus"))
        _, rest = page.split("<main>\n")
        opening, rest = rest.split("</section>", 1)
        assert "<b>30%</b>" in opening and "<b>80%</b>" in opening and said in opening
        assert "<td>&lt;sun&gt;</td><td>✗ (did not end)</td><td>✓ nus</td>" in opening
        assert '"reward_mean":[0.0,' in rest and "style=" not in opening, "its policy allows no style of its own"


@pytest.mark.parametrize(("num", "first", "last"), [(1, 0.0, 0.0), (2, 0.0, 1.0), (4, 0.5, 2.5), (7, 1.0, 5.0)])
def test_the_ends_of_a_short_run_do_not_overlap(
    num: int, first: float, last: float, metrics: list[dict[str, Any]], ledger: list[dict[str, Any]]
) -> None:
    rising = [record | {"reward_mean": float(i)} for i, record in enumerate(metrics[:num])]
    accuracy = evaluation(0.5, None)
    summary = summarize(rising, ledger, accuracy, accuracy, task="t", engine="e", seed=0, phases_s={}, cores={})
    assert (summary["reward_first"], summary["reward_last"]) == (first, last)


def test_what_the_last_publish_kept_of_adapters_is_in_the_summary(
    metrics: list[dict[str, Any]], ledger: list[dict[str, Any]], summary: dict[str, Any]
) -> None:
    assert summary["merged_share"] is None and "adapters" not in summary_rows(summary)
    adapted = [record | {"merged_share": record["iteration"] / 12} for record in metrics]
    accuracy = evaluation(0.5, None)
    found = summarize(adapted, ledger, accuracy, accuracy, task="t", engine="e", seed=0, phases_s={}, cores={})
    assert summary_rows({**found, "device_split": summary["device_split"]})["adapters"].startswith("changed 91.7% of")


def test_the_summary_has_what_it_promises(summary: dict[str, Any]) -> None:
    assert summary["iterations"] == ITERATIONS
    assert summary["seconds"] == 44.0
    assert (summary["accuracy_before"], summary["accuracy_after"], summary["accuracy_gain"]) == (0.3, 0.8, 0.5)
    rows = summary_rows(summary)
    assert rows["held-out accuracy"] == "0.300 → 0.800, a gain of +0.500"
    assert (rows["engine"], rows["a publish"], rows["seed"]) == ("vllm", "19.5 MB", "5")
    assert rows["time"].startswith("44 s: ")
    assert summary["reward_first"] == pytest.approx(2 / 12, abs=1e-4)
    assert summary["reward_last"] == pytest.approx(9 / 12, abs=1e-4)
    assert summary["on_policy"] is True
    assert summary["tokens_per_s"] == 500.0
    split = dict(summary["device_split"])
    assert split.pop("cores") == {"instance-0": [0], "trainer": [1]}
    assert split == pytest.approx({"waiting": 0.2, "training": 0.65, "publishing": 0.05, "other": 0.1})


@pytest.mark.parametrize("fault", ["missing", "refused", "version twice", "iteration twice"])
def test_a_run_is_on_policy_only_if_every_iteration_is_proven(
    metrics: list[dict[str, Any]], ledger: list[dict[str, Any]], fault: str
) -> None:
    assert is_on_policy(metrics, ledger)
    if fault == "missing":
        ledger.pop()
    elif fault == "refused":
        ledger[3]["on_policy"] = False
    elif fault == "version twice":
        ledger[3]["weight_version"] = ledger[2]["weight_version"]
    else:
        ledger.append(dict(ledger[3]))
    assert not is_on_policy(metrics, ledger)


def test_every_step_of_a_batch_has_a_proof_of_its_own(
    metrics: list[dict[str, Any]], ledger: list[dict[str, Any]]
) -> None:
    steps = [row for row in ledger for _ in range(2)]
    assert is_on_policy(metrics, steps)
    assert not is_on_policy(metrics, steps[:-1])
    assert not is_on_policy(metrics, [*steps[:-1], {**steps[-1], "on_policy": False}])
