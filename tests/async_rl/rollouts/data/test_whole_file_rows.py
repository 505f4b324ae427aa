"""JSON arrays and CSV as sources: the same rows as JSON lines; what is wrong is named with its place."""

import csv
import json
from pathlib import Path

import pytest

from async_rl.config.prompts_section import PromptsSection
from async_rl.errors import ConfigError
from async_rl.rollouts.data.part import parts_of
from async_rl.rollouts.data.row import Row

ROWS: list[Row] = [
    {"prompt": 'Say "a, b"\nand\r\nmore', "answer": "5"},
    {"prompt": "é€😀", "answer": None},
    {"prompt": " spaces ", "answer": "x" * 200_000},
]


def rows_of(path: Path) -> tuple[list[Row], list[Row]]:
    """The rows as they are scanned, and as they are found again."""
    (part,) = parts_of(PromptsSection(source=str(path), prompts_per_batch=1))
    rows = part.rows(seed=0)
    scanned = list(rows.scan())
    again = part.rows(seed=0)
    assert rows.identity() == again.identity()
    return [row for _, row in scanned], [again.row_at(place) for place, _ in scanned]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_every_format_has_the_same_rows(tmp_path: Path, mark: str) -> None:
    lines, array, table = (tmp_path / f"rows.{suffix}" for suffix in ("jsonl", "json", "csv"))
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    array.write_text(mark + json.dumps(ROWS, ensure_ascii=False), encoding="utf-8")
    with table.open("w", newline="", encoding="utf-8") as file:
        file.write(mark)
        writer = csv.DictWriter(file, ["prompt", "answer"])
        writer.writeheader()
        writer.writerows(ROWS)
    expected = rows_of(lines)
    assert rows_of(array) == rows_of(table) == expected
    assert "answer" not in expected[0][1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.json", b'{"prompt": "x"}\n{"prompt": "y"}', r"is not JSON: .*; a file of JSON lines is called \.jsonl"),
        ("rows.json", b'{"data": []}', "holds dict: expected one array of objects"),
        ("rows.json", b'[{"prompt": "x"}, 3]', "row 1 is int: each row must be an object"),
        ("rows.json", b"[" * 10**5, "is not JSON"),
        ("rows.json", b"\xff", "is not UTF-8 text"),
        ("rows.csv", b"prompt,answer\nx\n", "line 2 has 1 cells, but the first line names 2 columns"),
        ("rows.csv", b"prompt,answer\na, b,c\n", "line 2 has 3 cells"),
        ("rows.csv", b"prompt,prompt\nx,y\n", "has several columns 'prompt'"),
        ("rows.csv", b'prompt\n"x\n', "is not CSV"),
        ("rows.csv", b"prompt\n\xe9\n", "is not UTF-8 text"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        rows_of(tmp_path / name)


@pytest.mark.parametrize(("name", "content"), [("rows.json", b"[]"), ("rows.csv", b""), ("rows.csv", b"prompt\n")])
def test_a_file_without_rows_has_none(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert rows_of(tmp_path / name) == ([], [])
