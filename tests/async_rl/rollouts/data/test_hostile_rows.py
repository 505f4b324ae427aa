"""Rows as nobody should write them: taken, or refused with their place; never another error, and never half read."""

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from async_rl.config.prompts_section import MixturePart, PromptsSection
from async_rl.errors import ConfigError
from async_rl.rollouts.data.prompts import PromptSource
from tests.support.word_tokenizer import word_tokenizer

GOOD = b'{"prompt": "1 2", "answer": "3"}\n'

HALF = '"\\ud800 1"'


def load(path: Path, tokenizer: Any = None, **prompts: Any) -> list[dict[str, Any]]:
    source = source_of(path, tokenizer, **prompts)
    return [dict(prompt.row) for prompt in source.batch(0).prompts.values()]


def source_of(path: Path, tokenizer: Any = None, **prompts: Any) -> PromptSource:
    config = PromptsSection(**({"source": str(path), "prompts_per_batch": 1, "chat_template": False} | prompts))
    return PromptSource.load(config, tokenizer or word_tokenizer(), 0)


def lines(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows))
    return path


@pytest.mark.parametrize("content", [GOOD.replace(b"\n", b"\r\n"), GOOD.strip(), b"\n \n" + GOOD, GOOD * 2])
def test_ends_of_lines_do_not_matter(tmp_path: Path, content: bytes) -> None:
    assert load(lines(tmp_path, content)) == [{"prompt": "1 2", "answer": "3"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "line 1 is not JSON"),
        (b'{"prompt": "1", "a": ' + b"[" * 5000 + b"]" * 5000 + b"}", "line 1 is not JSON"),
        (b"\xef\xbb\xbf" + GOOD, "line 1 begins with a byte order mark: save the file as UTF-8 without one"),
        (GOOD.decode().encode("utf-16"), "line 1 is not UTF-8 text"),
        (b'{"prompt": ' + HALF.encode() + b"}", "row 0: its prompt has half of a letter"),
    ],
    ids=["deep", "deep value", "BOM", "UTF-16", "surrogate"],
)
def test_what_is_no_row_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(lines(tmp_path, content))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("difficulty", 10**400),
        ("difficulty", -(10**400)),
        ("difficulty", float("inf")),
        ("stop", "\ud800"),
        ("stop_token_ids", [2**70]),
        ("stop", ["x"] * 65),
    ],
    ids=lambda value: str(value)[:8].encode("ascii", "replace").decode(),
)
def test_values_that_nothing_can_hold_are_named(tmp_path: Path, name: str, value: Any) -> None:
    path = lines(tmp_path, {"prompt": "1", "x": {"difficulty": 1}.get(name)}, {"prompt": "2", "x": value})
    with pytest.raises(ConfigError, match=f"row 1: .*{name}"):
        load(path, columns={name: "x"})


@pytest.mark.parametrize("answer", [None, "", " ", float("nan"), [], {}])
def test_a_row_without_an_answer_is_left_out_however_it_says_so(tmp_path: Path, answer: Any) -> None:
    path = lines(tmp_path, {"prompt": "1", "x": answer}, {"prompt": "2", "x": 0})
    assert load(path, columns={"answer": "x"}) == [{"prompt": "2", "x": 0, "answer": 0}]


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
        ("{{ messages[0].text + 'x' }}", "UndefinedError"),
        ("{{ bad", "TemplateSyntaxError"),
    ],
)
def test_a_row_that_the_chat_template_does_not_take_is_named(tmp_path: Path, template: str, fault: str) -> None:
    tokenizer = copy.deepcopy(word_tokenizer())
    tokenizer.chat_template = "{% if messages[0].role == 'odd' %}" + template + "{% endif %}{{ messages[0].role }}"
    path = lines(tmp_path, {"prompt": "1"}, {"prompt": "2"}, {"prompt": [{"role": "odd", "content": ""}]})
    row = 0 if "bad" in template else 2
    with pytest.raises(ConfigError, match=f"row {row}: the tokenizer's chat template does not render .*{fault}"):
        load(path, tokenizer, chat_template=True)


PART = {"type": "text", "text": "1 "}


@pytest.mark.parametrize(
    ("content", "said"),
    [("1 2", "1 2"), ([PART, {"type": "input_text", "text": "2"}], "1 2"), ([PART, "2"], "1 2"), ([], ""), ("", "")],
)
def test_content_is_text_or_parts_of_text(tmp_path: Path, content: Any, said: str) -> None:
    """A template of text would write a list as Python does."""
    tokenizer = copy.deepcopy(word_tokenizer())
    tokenizer.chat_template = "{{ messages[0].content }}|{{ messages[1].content or 'calls' }}"
    calls = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}], "content": None}
    messages = [{"role": "user", "content": content}, calls, {"role": "tool", "content": "3"}]
    source = source_of(lines(tmp_path, {"prompt": messages}), tokenizer, chat_template=True)
    assert list(source.longest.token_ids) == tokenizer(f"{said}|calls", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("role", ["user", "system", "tool"])
@pytest.mark.parametrize(
    "content",
    [
        *(None, 3, True, float("nan"), {"type": "text", "text": "1"}, [3], [None], [{"type": "text"}]),
        *([{"type": "image_url", "image_url": "x"}], [PART, {"type": "image", "image": "x"}]),
        *([{"type": "text", "text": None}], [{"text": "1"}], [[PART]]),
    ],
)
def test_content_that_is_no_text_is_refused_with_its_place(tmp_path: Path, role: str, content: Any) -> None:
    messages = [{"role": role, "content": content}, {"role": "user", "content": "2"}]
    tokenizer = copy.deepcopy(word_tokenizer())
    tokenizer.chat_template = "{{ messages[0].content }}"
    path = lines(tmp_path, {"prompt": "1"}, {"prompt": messages})
    with pytest.raises(ConfigError, match=r"row 1: .* list of parts of text: correct prompt\[0\]\['content'\]"):
        load(path, tokenizer, chat_template=True)


def test_a_rows_stop_tokens_are_tokens(tmp_path: Path) -> None:
    size = len(word_tokenizer())
    path = lines(tmp_path, {"prompt": "1", "ends": [0, size - 1]}, {"prompt": "2", "ends": [1, size]})
    with pytest.raises(ConfigError, match=f"row 1: stop_token_ids has {size}, .* 0 to {size - 1}: look the ids up"):
        load(path, columns={"stop_token_ids": "ends"})
    good = lines(tmp_path, {"prompt": "1", "ends": [size - 1]})
    part = MixturePart(name="a", source=str(good), stop_token_ids=(size,), columns={"stop_token_ids": "ends"})
    (prompt,) = source_of(good, source=None, mixture=[part]).batch(0).prompts.values()
    assert prompt.stop_token_ids == (size, size - 1), "a model may have tokens that its tokenizer lacks"


def parquet(folder: Path, *columns: tuple[str, Any]) -> Path:
    path = folder / "rows.parquet"
    table = pyarrow.Table.from_arrays([values for _, values in columns], names=[name for name, _ in columns])
    pyarrow.parquet.write_table(table, path)
    return path


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = parquet(tmp_path, *(("prompt", pyarrow.array([text])) for text in ("1", "2")))
    with pytest.raises(ConfigError, match="has several columns 'prompt'"):
        load(path)


@pytest.mark.parametrize(
    "kind", [pyarrow.duration("s"), pyarrow.timestamp("ms"), pyarrow.date64()], ids=lambda kind: str(kind)
)
def test_a_time_that_python_does_not_have_is_named(tmp_path: Path, kind: Any) -> None:
    values = pyarrow.array([2**61 - 2**61 % 86_400_000], pyarrow.int64()).cast(kind)
    path = parquet(tmp_path, ("prompt", pyarrow.array(["1"])), ("x", values))
    with pytest.raises(ConfigError, match="a value cannot be read"):
        load(path)


def test_empty_row_groups_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    with pyarrow.parquet.ParquetWriter(path, pyarrow.schema([("prompt", pyarrow.string())])) as writer:
        for number in (0, 3, 0, 0, 70, 0):
            writer.write_table(pyarrow.table({"prompt": pyarrow.array(["1"] * number, pyarrow.string())}))
    assert len(load(path, prompts_per_batch=73)) == 73


def test_categories_that_differ_between_row_groups_are_read(tmp_path: Path) -> None:
    """Each row group of categories, as pandas and polars write them, has a dictionary of its own."""
    path = tmp_path / "rows.parquet"
    rows = [{"prompt": str(group), "level": f"of {group}", "n": group} for group in range(3)]
    kinds = [pyarrow.dictionary(pyarrow.int32(), pyarrow.string())] * 2 + [pyarrow.int64()]
    with pyarrow.parquet.ParquetWriter(path, pyarrow.schema(list(zip(rows[0], kinds, strict=True)))) as writer:
        for row in rows:
            writer.write_table(pyarrow.Table.from_pylist([row] * 40).cast(writer.schema))
    loaded = load(path, prompts_per_batch=120)
    assert [loaded.count(row) for row in rows] == [40, 40, 40]


@pytest.mark.parametrize("place", [5, 1000, -200, -20])
def test_a_broken_file_is_named_or_was_broken_where_nothing_is_read(tmp_path: Path, place: int) -> None:
    path = parquet(tmp_path, ("prompt", pyarrow.array([str(i) for i in range(2000)])))
    content = bytearray(path.read_bytes())
    content[place : place + 8] = bytes(byte ^ 0xFF for byte in content[place : place + 8])
    path.write_bytes(content)
    try:
        load(path)
    except ConfigError as error:
        assert "None" not in str(error)


@pytest.mark.parametrize("weight", [0, -1, 1e308, "x"])
def test_weights_are_numbers_that_can_be_added_up(weight: Any) -> None:
    with pytest.raises(ValueError, match="weight"):
        MixturePart(name="a", source="a.jsonl", weight=weight)


@pytest.mark.parametrize("weights", [[1, 1e-9], [5e-324, 5e-324], [1e6, 5e-324], [1e-9] * 40])
def test_any_weights_fill_a_batch(tmp_path: Path, weights: list[float]) -> None:
    path = str(lines(tmp_path, *({"prompt": str(i)} for i in range(5))))
    parts = [{"name": f"p{i}", "source": path, "weight": weight} for i, weight in enumerate(weights)]
    config = PromptsSection(mixture=parts, prompts_per_batch=5, chat_template=False)
    source = PromptSource.load(config, word_tokenizer(), 0)
    assert all(len(source.batch(t).prompts) == 5 for t in (0, 10**9))


def test_the_name_of_a_part_is_not_overwritten() -> None:
    with pytest.raises(ValueError, match="columns has source, which is the part's name: call 'k' something else"):
        MixturePart(name="a", source="a.jsonl", columns={"source": "k"})
