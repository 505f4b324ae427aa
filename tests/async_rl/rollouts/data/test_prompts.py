import json
import logging
import random
import tracemalloc
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerBase

from async_rl.config.prompts_section import PromptsSection
from async_rl.errors import ConfigError
from async_rl.rollouts.data.prompt_table import PromptTable
from async_rl.rollouts.data.prompts import PromptSource


@pytest.fixture
def words(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "words.jsonl", [{"prompt": f"word {i}", "answer": i} for i in range(10)])


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def section(source: Path | str, **options: Any) -> PromptsSection:
    return PromptsSection(**({"source": str(source), "prompts_per_batch": 4, "chat_template": False} | options))


def text(tokenizer: PreTrainedTokenizerBase, token_ids: tuple[int, ...]) -> str:
    return tokenizer.decode(list(token_ids))


def ids(source: PromptSource, iteration: int) -> list[str]:
    batch = source.batch(iteration)
    assert list(batch.prompts) == list(range(len(batch.prompts)))
    return [prompt.prompt_id for prompt in batch.prompts.values()]


def test_batch_is_a_function_of_seed_and_iteration(words: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    first, again = (PromptSource.load(section(words), tokenizer, seed=3) for _ in range(2))
    other = PromptSource.load(section(words), tokenizer, seed=4)
    assert [ids(first, t) for t in range(9)] == [ids(again, t) for t in reversed(range(9))][::-1]
    assert [ids(first, t) for t in range(3)] != [ids(other, t) for t in range(3)]
    assert first.batch(2).iteration == 2


def test_every_epoch_holds_every_row_once_in_its_own_order(words: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    source = PromptSource.load(section(words), tokenizer, seed=0)
    line = [prompt_id for t in range(5) for prompt_id in ids(source, t)]
    epochs = [line[:10], line[10:]]
    assert [sorted(epoch) for epoch in epochs] == [[str(i) for i in range(10)]] * 2
    assert epochs[0] != epochs[1]


def test_plain_prompts_are_tokenized_as_they_stand(words: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = PromptSource.load(section(words), tokenizer, seed=0).batch(0).prompts[0]
    assert text(tokenizer, prompt.token_ids) == prompt.row["prompt"] == f"word {prompt.prompt_id}"


def test_chat_template_renders_text_and_messages(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    path = write_jsonl(tmp_path / "chat.jsonl", [{"prompt": "hi"}, {"prompt": messages}])
    source = PromptSource.load(
        section(path, chat_template=True, system_prompt="be brief", prompts_per_batch=2), tokenizer, seed=0
    )
    texts = {p.prompt_id: text(tokenizer, p.token_ids) for p in source.batch(0).prompts.values()}
    assert texts == {
        "0": "system: be brief\nuser: hi\n",
        "1": "system: be brief\nuser: hi\nassistant: yes",
    }


def test_parquet_rows_are_read(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"problem": ["ab", "cd"], "answer": [1, 2]}), path)
    source = PromptSource.load(section(path, columns={"prompt": "problem"}, prompts_per_batch=2), tokenizer, seed=0)
    assert {p.row["answer"] for p in source.batch(0).prompts.values()} == {1, 2}


def test_reasoning_gym_task_gives_rows_that_can_be_scored_and_survive_json(tokenizer: PreTrainedTokenizerBase) -> None:
    config = section("reasoning-gym:spell_backward", task_options={"size": 20, "min_word_len": 5})
    source = PromptSource.load(config, tokenizer, seed=7)
    assert len(source) == 20
    row = source.batch(0).prompts[0].row
    assert row["task"] == "spell_backward" and row["metadata"]["word"][::-1] == row["answer"]
    assert len(row["answer"]) >= 5
    assert json.loads(json.dumps(row["metadata"]))["word"] == row["metadata"]["word"]


def test_long_prompts_are_reported_and_left_out(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "a" * length} for length in (5, 30, 6, 40, 7)] + [{"prompt": ""}]
    path = write_jsonl(tmp_path / "long.jsonl", rows)
    with caplog.at_level(logging.WARNING):
        source = PromptSource.load(section(path, max_prompt_tokens=10, prompts_per_batch=3), tokenizer, seed=0)
    assert sorted(ids(source, 0)) == ["0", "2", "4"]
    assert "2 of 6 prompts" in caplog.text and "longest: 40" in caplog.text and "rows 1, 3" in caplog.text
    assert "1 of 6 prompts are empty" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_prompt_tokens": 3}, "none is left"),
        ({"prompts_per_batch": 11}, "10 prompts are left for prompts.prompts_per_batch = 11"),
        ({"columns": {"prompt": "question"}}, "row 0: no value in column 'question'.*'answer', 'prompt'"),
        ({"columns": {"prompt": "answer"}}, "row 0: column 'answer' is int, expected text"),
        ({"system_prompt": "x"}, "prompts.chat_template = false leaves no place"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    words: Path, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        PromptSource.load(section(words, **options), tokenizer, seed=0)


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (7, r"7, .*correct prompt \(Input should be a valid list\)"),
        ([], r"\[\], .*correct prompt \(List should have at least 1 item"),
        (["hi"], r"correct prompt\[0\] \("),
        ([{"role": "user"}, {"content": "x"}], r"correct prompt\[1\]\['role'\] \(Field required\)"),
        ([{"role": 3}], r"correct prompt\[0\]\['role'\] \(Input should be a valid string\)"),
    ],
)
def test_what_is_no_chat_is_refused_with_its_row_and_what_is_wrong_in_it(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, value: Any, fault: str
) -> None:
    path = write_jsonl(tmp_path / "chat.jsonl", [{"prompt": "fine"}, {"prompt": value}])
    with pytest.raises(ConfigError, match=rf"row 1: column 'prompt' is .*{fault}"):
        PromptSource.load(section(path, chat_template=True, prompts_per_batch=1), tokenizer, seed=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "bad.jsonl, line 2 is not JSON"),
        ("list.jsonl", b"[1]\n", "list.jsonl, line 1 is list: each line must be one JSON object"),
        ("bytes.jsonl", b'{"prompt": "\xff"}\n', "bytes.jsonl, line 1 is not UTF-8 text"),
        ("empty.jsonl", b"", "has no rows"),
        ("bad.parquet", b"nothing", "bad.parquet is not a Parquet file"),
        ("rows.tsv", b"a,b", "expected a .jsonl, .json, .csv or .parquet file, a directory"),
    ],
)
def test_malformed_files_are_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        PromptSource.load(section(path), tokenizer, seed=0)


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.parquet"])
def test_missing_file_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}' cannot be read: No such file"):
        PromptSource.load(section(tmp_path / name), tokenizer, seed=0)


@pytest.mark.parametrize(
    ("source", "options"),
    [("reasoning-gym:no_such_task", {}), ("reasoning-gym:spell_backward", {"min_word_len": 0})],
)
def test_unknown_task_and_bad_task_options_are_refused(
    tokenizer: PreTrainedTokenizerBase, source: str, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=f"prompts.source '{source}' with prompts.task_options"):
        PromptSource.load(section(source, task_options=options), tokenizer, seed=0)


def test_a_rank_without_rollouts_has_the_same_batches_by_name(words: Path, tokenizer: Any) -> None:
    whole = PromptSource.load(section(words), tokenizer, seed=3)
    outlines = json.loads(json.dumps([asdict(each) for each in whole.outlines]))
    names = PromptSource.by_outlines(outlines, section(words), seed=3)
    for iteration in range(5):
        assert ids(whole, iteration) == ids(names, iteration)
    assert names.batch(0).prompts[0].token_ids == ()


def test_a_table_gives_back_what_was_put_in_and_tells_where_it_differs() -> None:
    rng = random.Random(0)
    rows = [(i, [rng.randrange(2**31) for _ in range(rng.randrange(1, 9))], {"t": ["x"] * i}) for i in range(200)]
    table, other = PromptTable(), PromptTable()
    for number, tokens, row in rows:
        table.append(number, tokens, row)
        other.append(number, tokens, row | ({"t": []} if number == 100 else {}))
    assert [(p.prompt_id, list(p.token_ids), p.row) for p in table] == [(str(n), t, r) for n, t, r in rows]
    assert table[-1].prompt_id == "199" and len(table[2:5]) == 3
    with pytest.raises(IndexError):
        table[200]
    (changed,) = [name for name, digest in table.digests().items() if other.digests()[name] != digest]
    first, last = map(int, changed.split(" to "))
    assert first <= 100 <= last < first + 5


def test_a_table_takes_four_bytes_a_token_beside_its_rows() -> None:
    table, row = PromptTable(), {"a": 1}
    tokens = list(range(1000))
    tracemalloc.start()
    for number in range(1000):
        table.append(number, tokens, row)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 1000 * 1000 * 4 * 1.25, "an array grows by an eighth at a time"
