import json
import re
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from async_rl.config.sections import RunSection, TrackingSection
from async_rl.errors import ConfigError
from async_rl.method.group_proof import GroupProof
from async_rl.method.ledger import Ledger
from async_rl.method.proof.gap_limits import NoiseLimits
from async_rl.method.proof.prompt_ids import from_runs
from async_rl.method.step_stats import StepStats
from async_rl.method.types import Batch, Prompt, Publication
from async_rl.records.recorder import RunRecorder
from async_rl.records.records import RECORDS, cut_records, cut_run_records, require_no_records, require_proofs
from async_rl.records.trackers.choice import open_trackers
from deploy.cluster.run_view import balance, describe


def write(path: Path, iterations: list[int], rest: bytes = b"") -> None:
    lines = [json.dumps({"iteration": iteration, "text": "é\u2028"}) + "\n" for iteration in iterations]
    path.write_bytes("".join(lines).encode() + rest)


def iterations(path: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize("rest", [b"", b'{"iteration": 3, "seco', b'{"iteration": 1}'])
def test_later_lines_and_a_half_written_one_are_cut(tmp_path: Path, rest: bytes) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, [0, 0, 1, 1, 2, 2], rest)
    assert cut_records(path, 2) == 2 + bool(rest)
    assert iterations(path) == [0, 0, 1, 1]
    before = path.stat().st_ino
    assert cut_records(path, 2) == 0
    assert path.stat().st_ino == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["ledger.jsonl"]


def test_a_run_that_starts_anew_loses_all_its_records(tmp_path: Path) -> None:
    assert cut_run_records(tmp_path, 0) == 0
    for name in RECORDS:
        write(tmp_path / name, [0, 1])
    assert cut_run_records(tmp_path, 0) == 2 * len(RECORDS)
    assert all((tmp_path / name).read_bytes() == b"" for name in RECORDS)


@pytest.mark.parametrize("line", [b"nothing\n", b"{}\n", b'"text"\n'])
def test_a_line_that_is_no_record_is_named_and_nothing_is_cut(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 0}\n' + line + b'{"iteration": 1}\n')
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl', line 2 is not a record with an iteration"):
        cut_records(path, 1)
    assert path.read_bytes() == before


def test_tensorboard_shows_a_resumed_run_as_one(tmp_path: Path) -> None:
    proof = GroupProof(0, "p", 1, 2, 3, ("v",), (1.0,), attempts=1, gaps=(), rollout_lengths=(3,))
    for first, losses in ((0, [1.0, 2.0, 3.0]), (1, [4.0])):
        time.sleep(1.0)  # Event files are read in the order of their names, which have the second in front.
        trackers = open_trackers(TrackingSection(), tmp_path, first, {})
        recorder = RunRecorder(tmp_path, iterations=3, trackers=trackers)
        for iteration, loss in enumerate(losses, start=first):
            record = recorder.begin_iteration(iteration)
            record.add_step([proof], StepStats(loss, 1.0, 1.0))
            recorder.end_iteration(record, Publication("v", "f", ("http://a",), 8, 0.0))
        trackers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 1.0), (1, 4.0)]


OLD_METRICS = {
    **{"iterations": 4, "weight_version": "ab-0", "seconds": 2.0, "wait_s": 0.5, "train_s": 1.0, "publish_s": 0.1},
    **{"step_s": 0.1, "rollout_s": 1.0, "first_group_s": 0.5, "reward_mean": 0.5, "response_tokens_mean": 8.0},
    **{"prompt_tokens": 6, "response_tokens": 32, "tokens_per_s": 19.0, "num_groups": 3, "num_instances": 1},
    "timeline": [[2, 0.1, 0.5, 0.6, 0.8], [0, 0.1, 0.6, 0.8, 0.9], [1, 0.1, 0.7, 0.9, 1.0]],
    "samples": [{"prompt_id": "12", "response": "nus", "reward": 1.0}],
}
OLD_PROOF = {
    **{"weight_version": "ab-0", "fingerprint": "f", "on_policy": True, "num_groups": 3, "num_responses": 6},
    **{"samples": "0123456789abcdef", "versions": ["ab-0"], "prompt_ids": ["12", "13", "3"], "violations": []},
}


def test_a_directory_of_an_older_release_is_read_cut_and_gone_on_with(tmp_path: Path) -> None:
    for name, row in (("metrics.jsonl", OLD_METRICS), ("ledger.jsonl", OLD_PROOF)):
        lines = "".join(json.dumps({"iteration": iteration, **row}) + "\n" for iteration in range(4))
        (tmp_path / name).write_text(lines + '{"iteration": 4, "weigh')
    assert cut_run_records(tmp_path, 3) == 4
    recorder = RunRecorder(tmp_path, iterations=4)
    ledger = Ledger(tmp_path / "ledger.jsonl", 1, NoiseLimits(1.0))
    record, proof = (
        recorder.begin_iteration(3),
        GroupProof(0, "12", 1, 2, 0, ("v",), (1.0,), attempts=1, gaps=(), rollout_lengths=(0,)),
    )
    recorder.write_groups(record, [proof])
    publication = Publication("v", "f", ("http://a",), 8, 0.0)
    ledger.require_on_policy(Batch(3, {0: Prompt("12", (1, 2), {})}), publication, [proof])
    record.add_step([proof], StepStats(0.5, 1.0, 1.0))
    recorder.end_iteration(record, publication)
    recorder.close()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines()]
    proofs = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_bytes().splitlines()]
    assert [row["iteration"] for row in records] == [row["iteration"] for row in proofs] == [0, 1, 2, 3]
    assert [from_runs(row["prompt_ids"]) for row in proofs] == [["12", "13", "3"]] * 3 + [["12"]]
    assert all(describe(row) and balance([row]) for row in records)


@pytest.mark.parametrize("name", [*RECORDS, "timeline.jsonl", "samples.jsonl", "timeline.3.jsonl"])
def test_any_file_of_records_is_another_run(tmp_path: Path, name: str) -> None:
    require_no_records(RunSection(dir=tmp_path))
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="holds the records of another run"):
        require_no_records(RunSection(dir=tmp_path))
    require_no_records(RunSection(dir=tmp_path, resume=True))


@pytest.mark.parametrize(
    ("lines", "missing"),
    [
        (None, "3 of the 3 trained iterations (0, 1, 2)"),
        ("", "3 of the 3"),
        ('{"iteration": 0}\n{"iteration": 2}\n', "1 of the 3 trained iterations (1)"),
        ('{"iteration": 0}\n{"iteration": 1}\n{"iteration": 2', "1 of the 3 trained iterations (2)"),
        ('{"iteration": 0}\n{"iteration": 0}\n{"iteration": 2}\n{"iteration": 1}\n', None),
    ],
)
def test_a_run_goes_on_without_a_proof_only_if_that_is_accepted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lines: str | None, missing: str | None
) -> None:
    if lines is not None:
        (tmp_path / "ledger.jsonl").write_text(lines)
    with pytest.raises(ConfigError, match=re.escape(missing)) if missing else nullcontext():
        require_proofs(tmp_path, 3, accept=False)
    require_proofs(tmp_path, 3, accept=True)
    assert (missing or "") in caplog.text and bool(caplog.text) == bool(missing)
    require_proofs(tmp_path, 0, accept=False)
