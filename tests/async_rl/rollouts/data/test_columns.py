"""Columns of a source under the names that a run uses: by the config, or by a format that is published."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from async_rl.config.prompts_section import PromptsSection
from async_rl.errors import ConfigError
from async_rl.method.types import Prompt
from async_rl.rollouts.data.prompts import PromptSource, conversation_of
from tests.support.word_tokenizer import word_tokenizer

ROWS: dict[str, list[dict[str, Any]]] = {
    "GSM8K": [{"question": "1 2", "answer": "so 3 <<1+2=3>>\n#### 1,203"}, {"question": "4", "answer": "#### -5"}],
    "MATH-500": [
        {
            "problem": "1 2",
            "solution": "...",
            "answer": "1203",
            "subject": "Algebra",
            "level": 2,
            "unique_id": "test/a/1.json",
        },
        {"problem": "4", "solution": "...", "answer": "-5", "subject": "Algebra", "level": 5, "unique_id": "b"},
    ],
    "DeepScaleR": [
        {"problem": "1 2", "answer": "1203", "solution": "..."},
        {"problem": "4", "answer": "-5", "solution": ""},
        {"problem": "5", "answer": "", "solution": ""},
    ],
    "DAPO": [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": prompt}],
            "ability": "MATH",
            "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b"},
        }
        for prompt, answer in [("1 2", "1203"), ("4", "-5")]
    ],
    "AIME24": [
        {"id": 60, "problem": "1 2", "solution": "", "answer": "1203", "url": "https://a", "year": "2024"},
        {"id": 61, "problem": "4", "solution": "", "answer": "-5", "url": "https://a", "year": "2024"},
    ],
    "AIME25": [{"problem": "1 2", "answer": "1203", "id": "0"}, {"problem": "4", "answer": "-5", "id": "1"}],
}


def write(folder: Path, rows: Sequence[dict[str, Any]], kind: str = "jsonl") -> str:
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(source: str, **prompts: Any) -> dict[str, Prompt]:
    config = PromptsSection(**({"source": source, "prompts_per_batch": 1} | prompts))
    made = PromptSource.load(config, word_tokenizer(), 0)
    found = [prompt for t in range(len(made)) for prompt in made.batch(t).prompts.values()]
    return {prompt.prompt_id: prompt for prompt in found}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", list(ROWS))
def test_published_formats_need_no_columns(
    tmp_path: Path, name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        prompts = load(write(tmp_path, ROWS[name], kind), system_prompt="7")
    assert {key: prompt.row["answer"] for key, prompt in prompts.items()} == {"0": "1203", "1": "-5"}
    for key, text in [("0", "1 2"), ("1", "4")]:
        row = prompts[key].row
        said = conversation_of(row, PromptsSection(source="x.jsonl", prompts_per_batch=1, system_prompt="7"))
        assert said == [{"role": "system", "content": "7"}, {"role": "user", "content": text}]
        assert all(row[column] == value for column, value in ROWS[name][int(key)].items() if column != "answer")
    assert ("1 of 3 prompts have no answer and are left out: rows 2" in caplog.text) == (name == "DeepScaleR")


def test_columns_of_the_config_win(tmp_path: Path) -> None:
    source = write(tmp_path, ROWS["GSM8K"])
    mapped = load(source, columns={"prompt": "question", "hint": "answer"})["0"].row
    assert mapped == ROWS["GSM8K"][0] | {"prompt": "1 2", "hint": ROWS["GSM8K"][0]["answer"]}
    swapped = load(write(tmp_path, ROWS["MATH-500"]), columns={"prompt": "answer", "answer": "problem"})["1"]
    assert swapped.row["answer"] == "4" and swapped.row["prompt"] == "-5"


def test_a_column_within_a_column(tmp_path: Path) -> None:
    prompts = load(write(tmp_path, ROWS["DAPO"]), columns={"answer": "extra_info.index"})
    assert prompts["0"].row["answer"] == "9a9b"
    dotted = [{"prompt": "1", "a.b": 2, "a": {"b": 3}}]
    assert load(write(tmp_path, dotted), columns={"answer": "a.b"})["0"].row["answer"] == 2


def test_a_row_says_where_its_responses_end(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1", "end": "</a>", "ids": [5, 6], "most": 9},
        {"prompt": "2", "end": ["x", "y"], "ids": None, "most": None},
        {"prompt": "3"},
    ]
    columns = {"stop": "end", "stop_token_ids": "ids", "max_response_tokens": "most"}
    for kind in ("jsonl", "parquet"):
        if kind == "parquet":
            rows[0]["end"] = ["</a>"]
        prompts = load(write(tmp_path, rows, kind), columns=columns)
        said = {key: (p.stop, p.stop_token_ids, p.max_response_tokens) for key, p in prompts.items()}
        assert said == {"0": (("</a>",), (5, 6), 9), "1": (("x", "y"), (), None), "2": ((), (), None)}


@pytest.mark.parametrize(
    ("row", "columns", "fault"),
    [
        ({"stop": ""}, {"stop": "stop"}, None),
        ({"stop": [""]}, {"stop": "stop"}, "row 0: stop is .*expected a text or a list of texts, none of them empty"),
        ({"ids": ["a"]}, {"stop_token_ids": "ids"}, r"row 0: stop_token_ids is \['a'\], expected a list of token ids"),
        ({"n": 0}, {"max_response_tokens": "n"}, "row 0: max_response_tokens is 0, expected a number from 1"),
        ({"n": "Level 3"}, {"difficulty": "n"}, r"row 0: column 'n' \(difficulty\) is 'Level 3', expected a number"),
        ({"n": float("nan")}, {"difficulty": "n"}, r"is nan, expected a number"),
        ({}, {"tests": "cases"}, r"no row has a value for \['tests'\] of its columns .*: correct them"),
        ({}, {"prompt": "ask"}, r"row 0: no value in column 'ask' \(it has \['prompt'\]\): set prompts.columns"),
        ({}, {"answer": "solution"}, "1 of 1 prompts have no answer.*none is left"),
    ],
)
def test_values_without_meaning_are_named(
    tmp_path: Path, row: dict[str, Any], columns: dict[str, str], fault: str | None
) -> None:
    source = write(tmp_path, [{"prompt": "1"} | row])
    if fault is None:
        assert load(source, columns=columns)["0"].stop == ()
        return
    with pytest.raises(ConfigError, match=fault):
        load(source, columns=columns)


@pytest.mark.parametrize(
    ("prompts", "fault"),
    [
        ({"columns": {"temperature": "t"}}, "trainer divides all logits by rollout.temperature"),
        ({"source": None}, "neither is set"),
        ({"mixture": [{"name": "a", "source": "a.jsonl"}]}, "both are set"),
        ({"held_out": 1.5}, "a share below 1, or a whole number"),
        ({"curriculum_iterations": 3}, "prompts.columns name no column of difficulty"),
        ({"source": None, "mixture": [{"name": "a", "source": "a"}, {"name": "a", "source": "b"}]}, "name of its own"),
        ({"source": None, "mixture": [{"name": "a/b", "source": "a"}]}, "expected letters, digits"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(prompts: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        PromptsSection(**({"source": "a.jsonl", "prompts_per_batch": 1} | prompts))
