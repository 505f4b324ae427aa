"""The same rows as JSON lines, as Parquet and as `save_to_disk` writes them: a table has all keys of all rows."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from async_rl.config.prompts_section import PromptsSection
from async_rl.rollouts.data.prompts import PromptSource
from async_rl.rollouts.data.row import without_nulls
from tests.support.word_tokenizer import word_tokenizer

TEMPLATE = "{% for m in messages %}{{ m | tojson }}{% if 'image' in m %}<IMAGE>{% endif %}\n{% endfor %}"

CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def conversation(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "1"}, *messages, {"role": "user", "content": "2"}]


def column(rng: random.Random, depth: int = 0) -> Any:
    """A schema: a kind of plain value, a list of one, or a struct of some, as Arrow can hold them."""
    kind = rng.choice(["int", "text", "bool", "list", "dict", "dict"] if depth < 3 else ["int", "text", "bool"])
    if kind == "list":
        return [column(rng, depth + 1)]
    return {f"k{i}": column(rng, depth + 1) for i in range(rng.randint(1, 3))} if kind == "dict" else kind


def value(rng: random.Random, schema: Any) -> Any:
    """Of that schema: keys may be missing or null, at any depth."""
    if isinstance(schema, list):
        return [value(rng, schema[0]) for _ in range(rng.randrange(3))]
    if isinstance(schema, dict):
        kept = {key: each for key, each in schema.items() if rng.random() < 0.7}
        return {key: None if rng.random() < 0.2 else value(rng, each) for key, each in kept.items()}
    return {"int": rng.randrange(100), "text": rng.choice(["", "x", "1 2"]), "bool": rng.random() < 0.5}[schema]


def random_rows(seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    message, extra, other = (column(rng, depth) for depth in (1, 0, 0))
    rows = []
    for i in range(12):
        middle = {"role": "assistant", "content": str(i), "more": value(rng, message)}
        row = {"prompt": conversation(middle), "extra": value(rng, extra), "other": value(rng, other)}
        rows.append({key: each for key, each in row.items() if key == "prompt" or rng.random() < 0.8})
    return rows


ROWS = {
    "tool arguments": [
        {"prompt": conversation({"role": "assistant", "tool_calls": [CALL]})},
        {
            "prompt": conversation(
                {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "g", "arguments": {"b": "x"}}}]}
            )
        },
    ],
    "parts": [
        {"prompt": conversation({"role": "user", "content": "3", "image": {"url": "u"}})},
        {"prompt": conversation({"role": "user", "content": "4"})},
    ],
    "what a reward gets": [{"prompt": "1", "checks": {"a": 1}}, {"prompt": "2", "checks": {"b": [None, 2]}}],
} | {f"random {seed}": random_rows(seed) for seed in range(20)}


@pytest.mark.parametrize("name", ROWS)
def test_prompts_and_rows_are_the_same_in_every_format(name: str, tmp_path: Path) -> None:
    rows = ROWS[name]
    datasets = pytest.importorskip("datasets")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = dict.fromkeys(key for row in rows for key in row)
    table = pyarrow.table({key: [row.get(key) for row in rows] for key in names})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    datasets.Dataset(table).save_to_disk(str(tmp_path / "saved"))
    (lines, *others) = (prompts_of(tmp_path / file, len(rows)) for file in ("rows.jsonl", "rows.parquet", "saved"))
    assert [row for _, row in lines] == [without_nulls(row) for row in rows]
    assert others == [lines, lines]


def test_rows_of_json_lines_may_have_values_that_no_table_of_arrow_holds(tmp_path: Path) -> None:
    """A column has one type there, and a whole number 64 bits: `docs/decisions.md` on `datasets`."""
    parts = [{"type": "text", "text": "5"}]
    rows = [
        {"prompt": "1", "answer": 12, "message": {"role": "user", "content": "4"}},
        {"prompt": "2", "answer": "12", "message": {"role": "user", "content": parts}},
        {"prompt": "3", "answer": 2**70},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row for _, row in prompts_of(tmp_path / "rows.jsonl", len(rows))] == rows


def prompts_of(path: Path, count: int) -> list[tuple[str, Any]]:
    tokenizer = word_tokenizer()
    texts: list[str] = []

    class Noting:
        chat_template = TEMPLATE

        def __call__(self, text: list[str], **options: Any) -> Any:
            texts.extend(text)
            return tokenizer(text, **options)

        def apply_chat_template(self, conversation: list[Any], **options: Any) -> Any:
            return tokenizer.apply_chat_template(conversation, chat_template=TEMPLATE, **options)

    config = PromptsSection(source=str(path), prompts_per_batch=count)
    source = PromptSource.load(config, Noting(), 0)  # type: ignore[arg-type]
    prompts = sorted(source.batch(0).prompts.values(), key=lambda prompt: int(prompt.prompt_id))
    return [(text, prompt.row) for text, prompt in zip(texts, prompts, strict=True)]


def test_nulls_in_lists_stay() -> None:
    row = {"a": None, "b": [None, {"c": None, "d": [[None]]}], "e": {}, "f": []}
    assert without_nulls(row) == {"b": [None, {"d": [[None]]}], "e": {}, "f": []}
