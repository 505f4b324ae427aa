import json
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from async_rl.errors import ConfigError
from async_rl.tracking.recorder import Recorder
from async_rl.tracking.records import RECORDS, cut_records, cut_run_records
from async_rl.types import GroupProof, Publication, StepStats


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
    proof = GroupProof(0, "p", 1, 2, 3, ("v",), (1.0,), attempts=1, gaps=())
    for first, losses in ((0, [1.0, 2.0, 3.0]), (1, [4.0])):
        time.sleep(1.0)  # Event files are read in the order of their names, which have the second in front.
        recorder = Recorder(tmp_path, iterations=3, first_iteration=first)
        for iteration, loss in enumerate(losses, start=first):
            record = recorder.begin(iteration)
            record.add_step([proof], StepStats(loss, 1.0, 1.0))
            recorder.end(record, Publication("v", "f", ("http://a",), 8, 0.0))
        recorder.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 1.0), (1, 4.0)]
