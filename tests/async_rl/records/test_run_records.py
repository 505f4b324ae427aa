import os
import random
from pathlib import Path

from async_rl.records.rotation import Rotation
from async_rl.records.run_records import RecordFile, RecordIndex, iteration_of, natural_order


def new_lines(file: RecordFile) -> list[bytes]:
    return [line for _, line in file.new_lines()]


def anew(file: RecordFile) -> list[bytes]:
    lines = new_lines(file)
    assert file.has_restarted
    return lines


def test_each_line_is_read_once_and_an_incomplete_one_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = RecordFile(path)
    assert new_lines(file) == []
    path.write_bytes(b"one\ntwo")
    assert new_lines(file) == [b"one\n"]
    path.write_bytes(b"one\ntwo\nthree\n")
    assert new_lines(file) == [b"two\n", b"three\n"]
    assert new_lines(file) == [] and not file.has_restarted


def test_a_file_that_was_replaced_cut_or_removed_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\ntwo\n")
    file = RecordFile(path)
    assert len(new_lines(file)) == 2

    other = tmp_path / "other"
    other.write_bytes(b"one\n2nd\nmore\n")
    other.replace(path)
    assert anew(file) == [b"one\n", b"2nd\n", b"more\n"]

    os.truncate(path, 4)
    assert anew(file) == [b"one\n"]

    with path.open("r+b") as opened:
        opened.write(b"uno\nb\n")
    assert anew(file) == [b"uno\n", b"b\n"]

    path.unlink()
    assert anew(file) == []
    assert new_lines(file) == [] and not file.has_restarted


def test_records_are_read_on_or_from_the_last_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b'{"a": 1}\n[]\nnonsense\n{"a": 2}\n{"a"')
    file, other = (RecordFile(tmp_path / "file") for _ in range(2))
    assert list(file.new_records()) == [{"a": 1}, {"a": 2}] and list(file.new_records()) == []
    assert list(other.newest_first()) == [{"a": 2}, {"a": 1}]


def rows(followed: RecordIndex[int], iteration: int) -> list[int]:
    return [row["index"] for span in followed.spans() if span.key == iteration for row in span.rows()]


def test_an_iteration_is_found_across_files_while_these_are_rotated_and_removed(tmp_path: Path) -> None:
    kind = Rotation("rows.jsonl", max_bytes=200, num_kept=2)
    followed = RecordIndex(kind, tmp_path, iteration_of)
    for iteration in range(8):
        kind.append(tmp_path, ({"iteration": iteration, "index": index} for index in range(4)))
        assert rows(followed, iteration) == [0, 1, 2, 3]
    afresh = RecordIndex(kind, tmp_path, iteration_of)
    assert followed.spans() == afresh.spans()
    assert len(kind.parts(tmp_path)) == 3 and rows(followed, 0) == []


def test_rows_of_a_span_are_consecutive_bytes_and_lines_that_are_no_records_are_left_out(tmp_path: Path) -> None:
    kind = Rotation("rows.jsonl", max_bytes=10**6, num_kept=1)
    whole = ['{"iteration": 0, "index": 1}', '{"iteration": 0, "index": 2}', "nonsense", '{"index": 3, "iteration": 0}']
    text = "\n".join([*whole, "[]", '{"iteration": 1'])
    (tmp_path / kind.name).write_text(text)
    followed = RecordIndex(kind, tmp_path, iteration_of)
    assert len(followed.spans()) == 2
    assert rows(followed, 0) == [1, 2, 3]


def test_only_a_whole_number_names_an_iteration() -> None:
    assert iteration_of(b'{"iteration": 12, "index": 0}') == 12
    assert iteration_of(b'{"index": 0, "iteration": 12}') == 12
    for line in (b'{"iteration": 1.5, "index": 0}', b'{"iteration": true}', b'{"iteration": "1"}', b"{}", b"[1]", b""):
        assert iteration_of(line) is None


def test_numbers_in_names_are_compared_as_numbers() -> None:
    long = "9" * 5000
    expected = ["", "10.0.0.9:8000", "10.0.0.10:8000", long, "a", "b1c9", "b1c10", "instance-2", "instance-010", "x²"]
    for _ in range(20):
        names = random.sample(expected, len(expected))
        assert sorted(names, key=natural_order) == expected
