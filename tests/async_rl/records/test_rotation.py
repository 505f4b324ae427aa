import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from async_rl.records.records import RECORDS, ROTATED, cut_run_records
from async_rl.records.rotation import Rotation
from tests.support.rotated_rows import rotated_rows

SMALL = Rotation("timeline.jsonl", max_bytes=100, num_kept=3)
ROW_BYTES = len(b'{"iteration": 10, "index": 0}\n')

WRITER = """
import sys
from itertools import count
from pathlib import Path
from async_rl.records.rotation import Rotation
timeline = Rotation("timeline.jsonl", max_bytes=20_000, num_kept=3)
for iteration in count(int(sys.argv[2])):
    timeline.append(Path(sys.argv[1]), ({"iteration": iteration, "index": i, "text": "x" * 400} for i in range(7)))
    print(iteration, flush=True)
"""


def names(run_dir: Path) -> list[str]:
    return [path.name for path in SMALL.parts(run_dir)]


def iterations(run_dir: Path) -> list[int]:
    return [row["iteration"] for row in rotated_rows(SMALL, run_dir)]


def write(run_dir: Path, first: int, last: int) -> None:
    for iteration in range(first, last + 1):
        SMALL.append(run_dir, [{"iteration": iteration, "index": 0}])


def test_only_so_many_files_of_at_most_so_many_bytes_stay_and_they_have_the_newest_rows(tmp_path: Path) -> None:
    write(tmp_path, 10, 99)
    assert names(tmp_path) == [*(f"timeline.{number}.jsonl" for number in (27, 28, 29)), "timeline.jsonl"]
    assert all(path.stat().st_size <= SMALL.max_bytes for path in SMALL.parts(tmp_path))
    assert iterations(tmp_path) == list(range(91 - 3, 100)), "three rows a file"


def test_one_append_may_fill_several_files_and_a_long_row_has_one_of_its_own(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"iteration": 10, "index": 0} for _ in range(7)]
    SMALL.append(tmp_path, [*rows, {"iteration": 11, "text": "x" * 500}, {"iteration": 12}])
    assert [path.stat().st_size // ROW_BYTES for path in SMALL.parts(tmp_path)[:2]] == [3, 1]
    assert len(SMALL.parts(tmp_path)[2].read_bytes().splitlines()) == 1
    assert iterations(tmp_path) == [10] * 4 + [11, 12], "the oldest three are gone"


def test_numbers_count_as_numbers_and_other_files_are_left_alone(tmp_path: Path) -> None:
    others = (
        "timeline.x.jsonl",
        "timeline.0.jsonl",
        "timeline.1.jsonl.bak",
        "my timeline.1.jsonl",
        "timeline.01.jsonl",
    )
    for name in others:
        (tmp_path / name).write_text("mine")
    write(tmp_path, 10, 99)
    assert all((tmp_path / name).read_text() == "mine" for name in others)
    for number in (9, 10, 100):
        (tmp_path / f"timeline.{number}.jsonl").touch()
    assert names(tmp_path)[:2] == ["timeline.9.jsonl", "timeline.10.jsonl"]


def test_text_stays_readable_and_what_is_not_text_is_escaped(tmp_path: Path) -> None:
    text = "naïve 数学 \ud83d \u2028 \x00 \x85 \n"
    SMALL.append(tmp_path, [{"iteration": 0, "text": text}])
    written = (tmp_path / SMALL.name).read_bytes()
    assert written.count(b"\n") == 1 and "数学".encode() in written
    assert next(rotated_rows(SMALL, tmp_path))["text"] == text


@pytest.mark.parametrize("torn", [b"", b'{"iteration": 21, "ind', b'{"iteration": 3}', b"\xff\xc3"])
@pytest.mark.parametrize("first", [0, 10, 11, 12, 13, 18, 19, 20, 21, 50])
def test_a_resumed_run_loses_later_rows_in_all_files_and_goes_on(tmp_path: Path, first: int, torn: bytes) -> None:
    write(tmp_path, 10, 20)
    with (tmp_path / SMALL.name).open("ab") as file:
        file.write(torn)
    kept = list(range(10, min(first, 21)))
    assert iterations(tmp_path) == list(range(10, 21))
    assert cut_run_records(tmp_path, first) == 11 - len(kept) + bool(torn)
    assert iterations(tmp_path) == kept
    assert all(path.stat().st_size for path in SMALL.parts(tmp_path)[:-1]), "no empty files are left"
    assert cut_run_records(tmp_path, first) == 0
    write(tmp_path, max(first, 10), max(first, 10) + 4)
    assert iterations(tmp_path)[-5:] == list(range(max(first, 10), max(first, 10) + 5))
    assert iterations(tmp_path) == sorted(iterations(tmp_path))


def test_a_file_that_was_renamed_when_the_writer_was_killed_is_no_loss(tmp_path: Path) -> None:
    write(tmp_path, 10, 12)
    (tmp_path / "timeline.jsonl").rename(tmp_path / "timeline.1.jsonl")
    assert cut_run_records(tmp_path, 12) == 1
    write(tmp_path, 12, 13)
    assert iterations(tmp_path) == [10, 11, 12, 13]


@pytest.mark.distributed
def test_a_writer_that_is_killed_leaves_whole_rows_and_at_most_a_torn_last_one(tmp_path: Path) -> None:
    first = 0
    for wait_s in (0.0, 0.01, 0.02, 0.05, 0.1):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            done = int(writer.stdout.readline())
            time.sleep(wait_s)
            writer.kill()
            done = max([done, *(int(line) for line in writer.stdout if line.endswith("\n"))])
        *full, last = SMALL.parts(tmp_path)
        assert all(path.read_bytes().endswith(b"\n") for path in full)
        assert all(path.stat().st_size <= 20_000 for path in (*full, last)) and len(full) <= 4
        first = done  # the last one may be incomplete, and is written again
        cut_run_records(tmp_path, first)
        rows = [(row["iteration"], row["index"]) for row in rotated_rows(SMALL, tmp_path)]
        assert rows == [divmod(i, 7) for i in range(7 * first - len(rows), 7 * first)], "none lost, none twice"


def test_a_run_that_starts_anew_has_none_of_any_kind(tmp_path: Path) -> None:
    for name in (*RECORDS, *(kind.name for kind in ROTATED), "samples.4.jsonl", "timeline.7.jsonl"):
        (tmp_path / name).write_text(json.dumps({"iteration": 0}) + "\n")
    assert cut_run_records(tmp_path, 0) == len(RECORDS) + len(ROTATED) + 2
    assert not list(tmp_path.glob("*.[0-9].jsonl"))
    assert all(path.stat().st_size == 0 for path in tmp_path.iterdir())
