"""One odd value among good rows, in every format and column: used or left out as documented, or named with its place.

Each case goes through what `async-rl check` reads and through the loading of a run, which have to agree.
"""

import csv
import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from async_rl.checks.preflight.data import require_prompts
from async_rl.config.prompts_section import PromptsSection
from async_rl.config.reward_section import RewardSection
from async_rl.errors import ConfigError
from async_rl.rollouts.data.part import parts_of
from async_rl.rollouts.data.prompts import PromptSource
from async_rl.rollouts.data.row import without_nulls
from async_rl.rollouts.data.table_files import measure_part
from async_rl.rollouts.rewards.readable_answers import answer_check
from tests.support.word_tokenizer import word_tokenizer

ODD_ROW = 2
NUM_ROWS = 5
LONG = "1 " * 5000

VALUES: Mapping[str, Any] = {
    "null": None,
    "NaN": math.nan,
    "empty": "",
    "space": " \t",
    "whole": 7,
    "real": 1.5,
    "true": True,
    "list": [1],
    "empty list": [],
    "dict": {"a": 1},
    "empty dict": {},
    "long": LONG,
    "surrogate": "1 \ud800",
    "message without role": [{"content": "1"}],
    "message of null": [{"role": "user", "content": None}],
    "message of NaN": [{"role": "user", "content": math.nan}],
    "message of a number": [{"role": "user", "content": 7}],
    "message of a dict": [{"role": "user", "content": {"text": "1"}}],
    "message of nulls": [{"role": "user", "content": [None]}],
    "message of a surrogate": [{"role": "user", "content": "\ud800"}],
    "role of NaN": [{"role": math.nan, "content": "1"}],
}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_array(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(rows))


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8", errors="surrogatepass") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    """What Arrow does not take in one column with text is no case; halves of letters, which it does not check, are."""
    columns = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if all(isinstance(value, str) for value in values) and "\ud800" in "".join(values):
            broken = [value.encode("utf-8", "surrogatepass") for value in values]
            columns[name] = pyarrow.array(broken, pyarrow.binary()).view(pyarrow.string())
        else:
            columns[name] = pyarrow.array(values, from_pandas=False)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


WRITERS: Mapping[str, Callable[[Path, list[dict[str, Any]]], None]] = {
    "jsonl": write_lines,
    "json": write_array,
    "csv": write_csv,
    "parquet": write_parquet,
}


class Loaded:
    """What became of the odd row: its row in the run, or why it has none."""

    def __init__(self, path: Path, caplog: pytest.LogCaptureFixture, reward: str, **prompts: Any) -> None:
        self.path = path
        config = PromptsSection(**({"source": str(path), "prompts_per_batch": NUM_ROWS - 1} | prompts))
        check = answer_check(RewardSection(name=reward))
        self.row: dict[str, Any] | None = None
        self.error = self.report = ""
        try:
            source = PromptSource.load(config, word_tokenizer(), 0, answers=check)
        except ConfigError as error:
            self.error = str(error)
        else:
            prompts_there = [p for t in range(NUM_ROWS) for p in source.batch(t).prompts.values()]
            self.row = next((dict(p.row) for p in prompts_there if p.prompt_id == str(ODD_ROW)), None)
            self.report = caplog.text
        (part,) = parts_of(config)
        try:
            require_prompts(config)
            measured = measure_part(part, part.rows(0), word_tokenizer(), check)
        except ConfigError as error:
            assert str(error) == self.error, "the check says what the run would"
        else:
            assert not self.error
            assert all(line in self.report for line in measured.report)


COLUMNS = {"answer": "answer", "stop": "end"}


@pytest.mark.parametrize("is_named", [True, False], ids=["answer in columns", "answer by itself"])
@pytest.mark.parametrize("kind", WRITERS)
def test_an_odd_value_is_handled_as_documented_or_named(
    kind: str, is_named: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    faults = {}
    for name, odd in VALUES.items():
        for column in ("prompt", "answer", "level", "end", "note"):
            row = {"prompt": "1 2", "answer": "3", "level": 4, "end": "5", "note": "6"}
            path = tmp_path / f"{name} {column}.{kind}"
            try:
                WRITERS[kind](path, [{**row, column: odd} if i == ODD_ROW else dict(row) for i in range(NUM_ROWS)])
            except (pyarrow.ArrowException, TypeError):
                assert kind == "parquet"
                continue
            caplog.clear()
            columns = {each: name for each, name in COLUMNS.items() if is_named or each != "answer"}
            # Every value of CSV is text, and so no difficulty.
            columns |= {} if kind == "csv" else {"difficulty": "level"}
            loaded = Loaded(path, caplog, "exact", columns=columns)
            if fault := fault_of(loaded, kind, column, odd):
                faults[name, column] = fault
    assert not faults


def fault_of(loaded: Loaded, kind: str, column: str, odd: Any) -> str | None:
    """What is wrong with what became of the row; None if nothing is."""
    is_half = "\\ud800" in json.dumps(odd)
    if loaded.error:
        # A file that is no text has bytes, not rows.
        row = "is not UTF-8 text" if kind == "csv" and is_half else f"row {ODD_ROW}: "
        return None if row in loaded.error and str(loaded.path) in loaded.error else loaded.error
    if loaded.row is None:
        is_said = all(words in loaded.report for words in (str(loaded.path), f": rows {ODD_ROW}", "left out"))
        return None if is_said and column in ("prompt", "answer") else f"left out, and said {loaded.report!r}"
    if kind == "csv":
        odd = None if odd is None or odd == "" else str(odd)
    return None if same(loaded.row.get(column), without_nulls({column: odd}).get(column)) else repr(loaded.row)


def same(one: Any, other: Any) -> bool:
    """NaN counts as itself."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


@pytest.mark.parametrize(
    ("kind", "column", "value", "outcome"),
    [
        ("jsonl", "prompt", None, "no value in column 'prompt'"),
        ("jsonl", "prompt", math.nan, "column 'prompt' is nan, expected text"),
        ("jsonl", "prompt", [{"role": "user", "content": math.nan}], "content is nan, expected text or a list"),
        ("jsonl", "prompt", LONG, "more than prompts.max_prompt_tokens"),
        ("jsonl", "answer", math.nan, "have no answer"),
        ("jsonl", "answer", {"a": 1}, "have an answer that the reward cannot read"),
        ("parquet", "note", "1 \ud800", "row 2: a value cannot be read"),
        ("csv", "prompt", None, "no value in column 'prompt'"),
    ],
)
def test_what_became_of_it_is_said(
    kind: str, column: str, value: Any, outcome: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "1 2", "answer": "3", "note": "6"} for _ in range(NUM_ROWS)]
    rows[ODD_ROW][column] = value
    WRITERS[kind](tmp_path / f"rows.{kind}", rows)
    with caplog.at_level(logging.WARNING):
        loaded = Loaded(tmp_path / f"rows.{kind}", caplog, "exact", columns={"answer": "answer"})
    assert outcome in (loaded.error or loaded.report)
