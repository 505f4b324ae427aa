"""Rows of any kind as a file, and functions beside it."""

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rl.api.inputs import Inputs, write_rows
from async_rl.api.settings import parsed, tree_of
from async_rl.errors import ConfigError
from async_rl.shared.programs.user_file import load_from_file


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Counted:
    """Iterable, with a length, and nothing else."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield {"prompt": "a"}
        yield {"prompt": "b"}


def test_rows_of_a_data_set_and_of_anything_with_a_length_are_lines(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    for given, expected in ((datasets.Dataset.from_list(rows), rows), (tuple(rows), rows), (Counted(), [*Counted()])):
        write_rows(tmp_path / "data.jsonl", given)
        assert lines(tmp_path / "data.jsonl") == expected


def test_numbers_of_numpy_and_dates_are_plain(tmp_path: Path) -> None:
    row = {"a": np.float32(0.5), "b": np.arange(2), "c": datetime.date(2026, 1, 2), 4: "four", "d": "\ud800"}
    write_rows(tmp_path / "data.jsonl", [row])
    assert lines(tmp_path / "data.jsonl") == [{"a": 0.5, "b": [0, 1], "c": "2026-01-02", "4": "four", "d": "\ud800"}]


def test_a_row_that_is_none_is_named_and_the_file_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    write_rows(path, [{"prompt": "a"}])
    with pytest.raises(ConfigError, match=r"data, row 1 \(from 0\) is 'text' \(str\): expected a dictionary"):
        write_rows(path, [{"prompt": "b"}, "text"])
    with pytest.raises(ConfigError, match=r"row 0 \(from 0\), column 'image' \(object\)"):
        write_rows(path, [{"prompt": "b", "image": object()}])
    assert lines(path) == [{"prompt": "a"}] and [each.name for each in tmp_path.iterdir()] == ["data.jsonl"]


def of_trl(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def test_a_reward_of_trls_form_needs_its_columns(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    settings: Any = {"prompts": {"prompts_per_batch": 1}, "train": {"iterations": 1}}

    def write(rows: Any) -> None:
        inputs = Inputs(tmp_path / "inputs")
        tree = tree_of(None, settings, model="m", data=rows, reward=of_trl, out=tmp_path)
        inputs.write(parsed(inputs.take(tree), "here"))

    write([{"prompt": "a", "answer": "b"}])
    assert load_from_file("reward.name", f"python:{tmp_path}/inputs/reward.py:reward")(["b"], ["b"]) == [1.0]
    with pytest.raises(ConfigError, match=r"takes answer, but the first rows have only prompt, solution"):
        write([{"prompt": "a", "solution": "b"}])
