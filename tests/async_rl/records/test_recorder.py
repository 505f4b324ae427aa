import contextlib
import json
import logging
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import ConfigError, Fenced
from async_rl.method.group_proof import GroupProof
from async_rl.method.proof.logprob_gaps import LogprobGaps
from async_rl.method.step_stats import StepStats
from async_rl.method.types import Group, Prompt, Publication, RolloutFacts
from async_rl.records.recorder import RunRecorder
from async_rl.records.rotation import SAMPLES, TIMELINE
from async_rl.records.samples import MAX_CHARACTERS, shorten, token_texts
from tests.support.clock import Clock
from tests.support.groups import make_group, make_response
from tests.support.rotated_rows import rotated_rows

VERSION = "v0"


def group(index: int, duration_s: float, **counts: int) -> Group:
    response = replace(make_response(text="5 6", logprobs=(-0.1, -0.2)), **counts)
    started_s = time.monotonic()
    return make_group(index, [response], rewards=[1.0], started_s=started_s, finished_s=started_s + duration_s)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time passes where a test says so, and a microsecond each time that it is read."""
    clock = Clock()

    def read() -> float:
        clock.sleep(1e-6)
        return clock.now_s

    monkeypatch.setattr(time, "monotonic", read)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


def run_iteration(
    recorder: RunRecorder, iteration: int, groups: list[Group], train_s: float, num_instances: int
) -> None:
    record = recorder.begin_iteration(iteration)
    with record.timed("period_s"):
        for each in groups:
            with record.training([[each]]):
                time.sleep(train_s)
    record.add_step([GroupProof.of(each, {"http://a": LogprobGaps(2)}) for each in groups], StepStats(0.0, 0.0, 0.0))
    instances = tuple(f"http://{i}" for i in range(num_instances))
    recorder.end_iteration(record, Publication(VERSION, "", instances, 0, 0.0))


def test_a_record_tells_idle_shares_and_interrupted_responses(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, iterations=1)
    groups = [group(0, 0.01, num_continued=2), group(1, 0.02, num_continued=1, num_resampled=1)]
    run_iteration(recorder, 0, groups, train_s=0.05, num_instances=1)
    recorder.close()
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert record["num_continued"] == 3 and record["num_resampled"] == 1
    assert record["idle_training"] == pytest.approx(0.0, abs=1e-3)
    assert record["idle_inference"] == pytest.approx(0.8, abs=1e-3)
    assert record["desired_instances"] == 1


def test_desired_instances_follow_from_rollouts_that_outlast_training(tmp_path: Path, caplog: Any) -> None:
    recorder = RunRecorder(tmp_path, iterations=2)
    groups = [group(index, 100.0) for index in range(6)]
    with caplog.at_level(logging.INFO):
        run_iteration(recorder, 0, groups, train_s=0.01, num_instances=2)
        recorder.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["desired_instances"] == 6, "at most one per group"
    assert "6 instances would balance the pools, 2 took part" in caplog.text


def test_the_reward_of_each_part_of_a_mixture_is_recorded(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, iterations=1)
    groups = [
        replace(group(i, 0.01), prompt=Prompt(f"{part}/{i}", (1,), {}), rewards=(reward,))
        for i, (part, reward) in enumerate([("a", 1.0), ("b", 0.25), ("a", 0.0)])
    ]
    run_iteration(recorder, 0, groups, train_s=0.0, num_instances=1)
    recorder.close()
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert {key: value for key, value in record.items() if "/" in key} == {"reward_mean/a": 0.5, "reward_mean/b": 0.25}


def test_every_record_is_handed_on(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    recorder = RunRecorder(tmp_path, 2, on_record=lambda record: seen.append(dict(record)))
    for iteration in range(2):
        run_iteration(recorder, iteration, [group(0, 0.01)], train_s=0.0, num_instances=1)
    recorder.close()
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in seen] == [0, 1]
    assert [record["desired_instances"] for record in seen] == [record["desired_instances"] for record in written]


def test_turns_and_branches_are_recorded_per_rollout_and_only_where_there_are_any(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, iterations=3)
    single = group(0, 0.01)
    response = single.responses[0]
    branch = replace(response, token_ids=(5, 6, 7, 8), observed=((0, 2),), text="7 8")
    agents = replace(
        single,
        responses=(response, branch, branch, response),
        rewards=(1.0, 0.0),
        rollouts=(RolloutFacts(num_responses=3, num_turns=4, status="truncated"), RolloutFacts()),
    )
    cut = replace(single, rollouts=(RolloutFacts(status="truncated"),))
    for iteration, each in enumerate((single, replace(agents, iteration=1), replace(cut, iteration=2))):
        run_iteration(recorder, iteration, [each], train_s=0.0, num_instances=1)
    recorder.close()
    names = ("response_tokens_mean", "turns_mean", "branches_mean", "truncated_share")
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [[record.get(name) for name in names] for record in records] == [
        [2.0, None, None, 0.0],
        [4.0, 2.5, 1.0, 0.5],
        [2.0, None, None, 1.0],
    ]
    first, second, _ = rotated_rows(SAMPLES, tmp_path)
    assert first["responses"] == [{"text": "5 6", "reward": 1.0, "num_tokens": 2, "finish_reason": "stop"}]
    # Two of the three responses of the first rollout, and the second rollout.
    assert [(row["text"], row["reward"], row["num_tokens"]) for row in second["responses"]] == [
        ("5 6", 1.0, 2),
        ("7 8", 1.0, 2),
        ("5 6", 0.0, 2),
    ]
    assert [row.get("status") for row in second["responses"]] == ["truncated", "truncated", None]


def test_a_skipped_step_is_told_and_figures_that_are_not_finite_are_null(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, iterations=2)
    good, bad = (
        StepStats(0.5, 1.0, 1e-3, {"kl": 0.25}, 1),
        StepStats(float("nan"), float("inf"), 1e-3, {"kl": 9.0}, 0, True),
    )
    for iteration, steps in enumerate(([good, bad], [bad])):
        record = recorder.begin_iteration(iteration)
        for stats in steps:
            record.add_step([GroupProof.of(group(0, 0.0), {"http://a": LogprobGaps(2)})], stats)
        recorder.end_iteration(record, Publication(VERSION, "", ("http://a",), 0, 0.0))
    recorder.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert not any(word in line for word in ("NaN", "Infinity") for line in lines)
    first, second = (json.loads(line) for line in lines)
    assert (first["skipped_steps"], first["loss"], first["grad_norm"], first["kl"]) == (1, 0.5, 1.0, 0.25)
    assert first["untrained_groups"] == 0.5
    assert (second["skipped_steps"], second["loss"], second["grad_norm"]) == (1, None, None)


def test_accuracy_is_recorded_only_for_a_reward_that_says_what_is_correct(tmp_path: Path, caplog: Any) -> None:
    for name, correct_at in (("silent", None), ("strict", 1.5), ("lenient", 1.0)):
        (tmp_path / name).mkdir()
        recorder = RunRecorder(tmp_path / name, iterations=1, correct_at=correct_at)
        with caplog.at_level(logging.INFO):
            run_iteration(recorder, 0, [group(0, 0.01)], train_s=0.0, num_instances=1)
        recorder.close()
    records = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("*/metrics.jsonl")}
    assert "accuracy" not in records["silent"]
    assert (records["strict"]["accuracy"], records["lenient"]["accuracy"]) == (0.0, 1.0)
    assert caplog.text.count("accuracy") == 2


def test_each_part_of_a_reward_is_recorded_over_what_it_scored_and_one_counts_as_correct(tmp_path: Path) -> None:
    mixed = [
        replace(group(0, 0.01), rewards=(1.4,), reward_parts=(("math", (1.0,)), ("format", (2.0,)))),
        replace(group(1, 0.01), rewards=(0.0,), reward_parts=(("math", (0.0,)), ("code", (0.5,)))),
        replace(group(2, 0.01), rewards=(9.0,), reward_parts=(("judge", (9.0,)),)),
        replace(group(3, 0.01), rewards=(1.0,), reward_parts=(("code", (1.0,)), ("judge", (1.0,)))),
    ]
    recorder = RunRecorder(tmp_path, iterations=1, correct_at={"math": 1.0, "code": 1.0})
    run_iteration(recorder, 0, mixed, train_s=0.0, num_instances=1)
    recorder.close()
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    means = {key: value for key, value in record.items() if key.startswith("reward/")}
    assert means == {"reward/math": 0.5, "reward/format": 2.0, "reward/code": 0.75, "reward/judge": 5.0}
    # Right by math, wrong by math, not judged by either, right by code.
    assert record["accuracy"] == 2 / 3
    (row, *_) = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    assert row["responses"][0]["reward_parts"] == {"math": 1.0, "format": 2.0}


def test_metrics_of_a_reward_are_recorded_over_the_batch(tmp_path: Path) -> None:
    reported = [
        replace(group(0, 0.01), reward_metrics=(("acc", (1.0,)), ("length", (4.0,)))),
        replace(group(1, 0.01), reward_metrics=(("acc", (0.0,)),)),
    ]
    recorder = RunRecorder(tmp_path, iterations=1)
    run_iteration(recorder, 0, reported, train_s=0.0, num_instances=1)
    recorder.close()
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (record["reward/acc"], record["reward/length"]) == (0.5, 4.0)
    (row, *_) = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    assert row["responses"][0]["reward_parts"] == {"acc": 1.0, "length": 4.0}


def test_groups_are_on_file_even_if_the_iteration_does_not_end(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, iterations=1)
    record = recorder.begin_iteration(0)
    trained, elsewhere = group(1, 0.5), group(0, 0.5)
    with record.training([[trained]]):
        pass
    recorder.write_groups(
        record, [GroupProof.of(each, {"http://a": LogprobGaps(2, largest=0.25)}) for each in (trained, elsewhere)]
    )
    recorder.close()
    other, own = rotated_rows(TIMELINE, tmp_path)
    assert (own["index"], own["prompt_id"], own["versions"]) == (1, "p1", [VERSION])
    assert own["logprob_gaps"]["http://a"]["max"] == 0.25
    assert own["finished_s"] - own["started_s"] == pytest.approx(0.5, abs=1e-5)
    assert other["index"] == 0 and "started_s" not in other, "of another replica: its clock is not ours"


def test_samples_are_the_first_groups_by_place_whatever_finishes_first(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, iterations=2, decode=lambda token_ids: f"prompt of {tuple(token_ids)}")
    run_iteration(recorder, 0, [group(index, 0.01) for index in (7, 2, 9, 0, 5)], train_s=0.0, num_instances=1)
    run_iteration(recorder, 1, [group(4, 0.01)], train_s=0.0, num_instances=1)
    recorder.close()
    rows = list(rotated_rows(SAMPLES, tmp_path))
    assert [row["index"] for row in rows] == [0, 2, 5, 4]
    assert rows[0] == {
        "iteration": 0,
        "index": 0,
        "prompt_id": "p0",
        "weight_version": VERSION,
        "prompt": "prompt of (3, 4)",
        "responses": [{"text": "5 6", "reward": 1.0, "num_tokens": 2, "finish_reason": "stop"}],
    }


def test_tokens_of_samples_have_the_log_probs_of_both_sides(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, iterations=1, decode=lambda token_ids: "".join(f" {i}" for i in token_ids))
    record = recorder.begin_iteration(0)
    own = group(0, 0.1)
    with record.training([[own]]):
        pass
    gaps = {"http://a": LogprobGaps(2)}
    record.add_step([GroupProof.of(own, gaps, shown_logprobs=((-0.125, math.nan),))], StepStats(0.0, 0.0, 0.0))
    recorder.end_iteration(record, Publication(VERSION, "", ("http://a",), 0, 0.0))
    recorder.close()
    (row,) = rotated_rows(SAMPLES, tmp_path)
    (response,) = row["responses"]
    assert response["tokens"] == [" 5", " 6"]
    assert response["rollout_logprobs"] == [-0.1, -0.2]
    assert response["trainer_logprobs"] == [-0.125, None]


def test_texts_of_tokens_are_together_the_text_of_all() -> None:
    data = [*("a b é€😀".encode()), 0xFF, *b"z"]
    texts = token_texts(data, lambda ids: bytes(ids).decode(errors="replace"))
    assert "".join(texts) == "a b é€😀\N{REPLACEMENT CHARACTER}z"
    assert (
        len(texts) == len(data)
        and texts[4] == ""
        and texts[5] == "é"
        and texts[-2:] == ["", "\N{REPLACEMENT CHARACTER}z"]
    )
    # As tokenizers whose text of the first token lacks the space in front of it.
    assert token_texts([1, 2, 3], lambda ids: " ".join(f"w{i}" for i in ids)) == ["w1", " w2", " w3"]
    assert token_texts([], lambda ids: "") == []


def test_a_text_is_shortened_in_its_middle_and_never_made_longer() -> None:
    for size in (0, 1, MAX_CHARACTERS - 1, MAX_CHARACTERS):
        assert shorten("é" * size) == "é" * size
    long = "a" * MAX_CHARACTERS + "z" * MAX_CHARACTERS
    short = shorten(long)
    assert len(short) < MAX_CHARACTERS + 50
    assert short.startswith("aaa") and short.endswith("zzz") and f"[... {MAX_CHARACTERS} characters ...]" in short


def test_nothing_is_written_once_another_trainer_writes_the_files(tmp_path: Path) -> None:
    def fenced() -> None:
        raise Fenced("term 1 has ended")

    recorder = RunRecorder(tmp_path, iterations=1, require_lease=fenced)
    record = recorder.begin_iteration(0)
    with pytest.raises(Fenced):
        recorder.write_groups(record, [GroupProof.of(group(0, 0.1), {"http://a": LogprobGaps(2)})])
    with pytest.raises(Fenced):
        run_iteration(recorder, 0, [group(0, 0.1)], train_s=0.01, num_instances=1)
    recorder.close()
    assert not list(tmp_path.iterdir())


def test_a_metric_of_an_algorithm_does_not_replace_a_figure_of_the_record(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, iterations=1)
    record = recorder.begin_iteration(0)
    stats = StepStats(0.0, 0.0, 0.0, {"mine": 1.0, "loss": 2.0, "iteration": 3.0})
    record.add_step([GroupProof.of(group(0, 0.01), {"http://a": LogprobGaps(2)})], stats)
    with pytest.raises(ConfigError, match="metrics called iteration, loss, as figures of every record are: give them"):
        recorder.end_iteration(record, Publication(VERSION, "", ("http://a",), 0, 0.0))


def test_groups_that_a_selection_left_out_have_rows_that_say_so(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, iterations=1, has_reserve=True)
    rows = [GroupProof.of(group(index, 0.01), {"http://a": LogprobGaps(2)}) for index in range(2)]
    left_out = replace(rows[0], is_trained=False, gaps=())
    recorder.write_groups(recorder.begin_iteration(0), [rows[1], left_out])
    first, second = rotated_rows(TIMELINE, tmp_path)
    assert (first["index"], first["is_trained"], first["logprob_gaps"]) == (0, False, {})
    assert (second["index"], "is_trained" in second) == (1, False)


def test_what_leaving_a_batch_costs_is_no_lack_of_overlap(tmp_path: Path) -> None:
    class Rollouts(contextlib.AbstractContextManager[str]):
        left_with: object = None

        def __enter__(self) -> str:
            return "groups"

        def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
            self.left_with = kind
            time.sleep(3)

    recorder, rollouts = RunRecorder(tmp_path, iterations=1), Rollouts()
    record = recorder.begin_iteration(0)
    with record.timed_exit("evaluation_s", rollouts) as groups:
        assert groups == "groups"
        with record.timed("period_s"), record.training([[group(0, 1.0)]]):
            time.sleep(1)
    rows = [GroupProof.of(group(0, 1.0), {"http://a": LogprobGaps(2)})]
    record.add_step(rows, StepStats(0.0, 0.0, 0.0))
    recorder.end_iteration(record, Publication(VERSION, "", ("http://a",), 8, 2.0, canary_s=1.5))
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["evaluation_s"] == pytest.approx(3, abs=1e-3) and line["canary_s"] == 1.5
    assert line["publish_bytes"] == 8
    assert line["seconds"] == pytest.approx(4, abs=1e-3) and line["overlap_efficiency"] > 0.99
    with pytest.raises(ValueError), record.timed_exit("evaluation_s", rollouts):
        raise ValueError
    assert rollouts.left_with is ValueError


def test_ten_iterations_without_a_gradient_are_warned_of_once_with_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = RunRecorder(tmp_path, iterations=99)
    untrained = [1] * 9 + [0] + [1] * 12
    for iteration, num_untrained in enumerate(untrained):
        record = recorder.begin_iteration(iteration)
        rows = [GroupProof.of(group(0, 1.0), {"http://a": LogprobGaps(2)})]
        record.add_step(rows, replace(StepStats(0.0, 0.0, 0.0), num_untrained=num_untrained))
        recorder.end_iteration(record, Publication(VERSION, "", ("http://a",), 0, 0.0))
        assert ("had a gradient" in caplog.text) == (iteration >= 19)
    assert caplog.text.count("no group of the last 10 iterations had a gradient") == 1
    assert f"async-rl samples {tmp_path}" in caplog.text and "If none is right" in caplog.text


def test_samples_have_the_row_and_on_request_every_response(tmp_path: Path) -> None:
    row = {"question": "5 6", "answer": "5", "tests": [1, 2], "long": "x" * 900}
    own = make_group(0, [make_response(text=str(i)) for i in range(4)], prompt=Prompt("p", (5, 6), row))
    for all_responses, texts in ((False, ["0", "1"]), (True, ["0", "1", "2", "3"])):
        run_dir = tmp_path / str(all_responses)
        run_dir.mkdir()
        recorder = RunRecorder(run_dir, 1, decode=lambda ids: " ".join(map(str, ids)), all_responses=all_responses)
        record = recorder.begin_iteration(0)
        with record.training([[own]]):
            pass
        shown_logprobs = ((-0.5,), (-0.25,))
        proof = GroupProof.of(own, {"http://a": LogprobGaps(2)}, shown_logprobs=shown_logprobs)
        record.add_step([proof], StepStats(0.0, 0.0, 0.0))
        recorder.end_iteration(record, Publication(VERSION, "", ("http://a",), 0, 0.0))
        (sample,) = rotated_rows(SAMPLES, run_dir)
        assert [response["text"] for response in sample["responses"]] == texts
        assert ["tokens" in response for response in sample["responses"]] == [i < 2 for i in range(len(texts))]
        assert sample["row"].keys() == {"answer", "tests", "long"}, "the question is the prompt"
        assert sample["row"]["tests"] == "[1, 2]" and len(sample["row"]["long"]) < 600
