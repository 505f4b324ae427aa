import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from async_rl.parts.dashboard.report import fitting, main, report, spread, thinned_records
from async_rl.parts.dashboard.run_data import as_json, open_run
from tests.support.synthetic_run import SCRIPT, SyntheticRun


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script id="embedded" type="application/json">(.*?)</script>', page, re.S)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_a_report_is_one_page_with_all_records_and_without_any_address(tmp_path: Path) -> None:
    runs = [SyntheticRun(tmp_path / name, num_iterations=4 + number) for number, name in enumerate(("one", "two"))]
    for run in runs:
        run.write()
    output = tmp_path / "report.html"
    assert main([*(str(run.run_dir) for run in runs), "-o", str(output)]) == 0
    page = output.read_text()
    assert not re.search(r'(src|href)="(?!#)', page) and "@import" not in page
    data = data_of(page)
    assert [run["name"] for run in data["runs"]] == ["one", "two"]
    for run, own in zip(runs, data["runs"], strict=True):
        numbers = range(run.num_iterations)
        assert own["records"]["metrics"]["columns"]["loss"] == [run.record(i)["loss"] for i in numbers]
        assert len(own["periods"]) == len(own["records"]["proofs"]["rows"]) == run.num_iterations
        places = [(row["iteration"], row["index"]) for row in own["samples"]]
        assert places == [(i, index) for i in reversed(numbers) for index in range(3)], "as the live page has them"


def test_texts_of_a_run_cannot_end_the_script_that_holds_them(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "<b>&run", num_iterations=2)
    run.write()
    page = report([open_run(run.run_dir)])
    assert SCRIPT not in page
    assert SCRIPT in data_of(page)["runs"][0]["samples"][0]["responses"][0]["text"]
    assert "<title>&lt;b&gt;&amp;run</title>" in page


def test_records_of_a_long_run_are_thinned_but_for_the_last_iteration_and_violations(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", num_iterations=100, num_groups=2)
    run.write()
    ledger = run.run_dir / "ledger.jsonl"
    ledger.write_text(ledger.read_text() + json.dumps({**run.proof(17), "on_policy": False}) + "\n")
    whole = open_run(run.run_dir).records(0, 0, 0)
    max_bytes = len(as_json(whole)) // 4
    assert thinned_records(whole, 4 * max_bytes + 4) == whole
    thinned = thinned_records(whole, max_bytes)
    assert len(as_json(thinned)) < 1.1 * max_bytes
    metrics, iterations = thinned["metrics"], thinned["metrics"]["iterations"]
    assert 20 < len(iterations) < 30 and iterations[0] == 0 and iterations[-1] == 99
    assert metrics["columns"]["loss"] == [run.record(i)["loss"] for i in iterations]
    assert metrics["hours"] == [whole["metrics"]["hours"][i] for i in iterations]
    assert thinned["proofs"]["total"] == 101 and thinned["proofs"]["rows"][-1]["on_policy"] is False


@pytest.mark.parametrize(("every", "num_sets"), [(1, 8), (10, 1), (50, 3)])
def test_each_evaluation_that_a_thinned_report_has_is_drawn_and_all_of_them_are_bounded(
    tmp_path: Path, every: int, num_sets: int
) -> None:
    run = SyntheticRun(tmp_path / "run", num_iterations=200, num_groups=2)
    run.write()
    rows = [
        {"iteration": iteration, "set": f"set {number}", "complete": True, "avg@8": 0.25, "temperature": 1.0}
        for iteration in range(0, 200, every)
        for number in range(num_sets)
    ]
    (run.run_dir / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = open_run(run.run_dir).records(0, 0, 0)
    max_bytes = len(as_json(whole)) // 8
    thinned = thinned_records(whole, max_bytes)
    kept = [record["iteration"] for record in thinned["evaluations"]]
    assert set(kept) <= set(thinned["metrics"]["iterations"]) and all(kept.count(each) == num_sets for each in kept)
    assert kept[-1] == 200 - every and (len(kept) < len(rows) or every > 1)
    assert len(as_json(thinned)) < 1.1 * max_bytes


def test_thinning_keeps_equal_distances_and_the_last_one() -> None:
    assert spread(range(100), 4) == [0, 33, 66, 99]
    assert spread(range(3), 5) == [0, 1, 2]
    assert spread(range(9), 1) == [8]
    assert spread(range(9), 0) == spread([], 3) == []
    assert list(fitting(["x" * 8] * 10, 35)) == ["x" * 8] * 3
    assert list(fitting(["x" * 8], 3)) == []
    assert list(fitting(["<" * 8] * 4, 150)) == ["<" * 8] * 3, "each is six bytes in the page"


def test_a_report_of_no_run_and_one_that_cannot_be_written_name_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "missing")]) == 2
    assert "is not a directory" in capsys.readouterr().err
    SyntheticRun(tmp_path / "run", num_iterations=1).write()
    for output in (tmp_path / "no" / "report.html", tmp_path, Path(), Path("/")):
        assert main([str(tmp_path / "run"), "-o", str(output)]) == 2
        assert "cannot write" in capsys.readouterr().err


def test_a_run_whose_directory_is_no_text_has_a_report(tmp_path: Path) -> None:
    run_dir = tmp_path / os.fsdecode(b"run\xff")
    SyntheticRun(run_dir, num_iterations=1).write()
    assert main([str(run_dir), "-o", str(tmp_path / "report.html")]) == 0
    assert "<title>run\ufffd</title>" in (tmp_path / "report.html").read_text()
