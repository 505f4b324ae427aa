"""Tables on disk: written once, taken again by what they contain, and removed when nothing needs them."""

import copy
import json
import logging
import multiprocessing
import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from async_rl.config.prompts_section import PromptsSection
from async_rl.errors import ConfigError, WriteFailed
from async_rl.rollouts.data.prompts import PromptSource, load_prompts
from async_rl.rollouts.data.tabular_rows import TabularRows
from tests.support.full_disk import largest_file
from tests.support.word_tokenizer import word_tokenizer


def write(folder: Path, num: int, kind: str = "jsonl", first: int = 0) -> Path:
    path = folder / f"rows.{kind}"
    rows = [{"prompt": f"{i} {i + 1}", "answer": f"{i}", "more": {"a": [i]}} for i in range(first, first + num)]
    if kind == "parquet":
        # Groups of rows whose size has nothing to do with that of the copy's blocks.
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=37)
    else:
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return path


def section(source: Path, **prompts: Any) -> PromptsSection:
    return PromptsSection(**({"source": str(source), "prompts_per_batch": 8, "chat_template": False} | prompts))


def load(config: PromptsSection, cache: Path | None) -> PromptSource:
    return PromptSource.load(config, word_tokenizer(), 0, cache)


def tables(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name != ".lock")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_table_is_written_once_and_gives_the_same_prompts(tmp_path: Path, kind: str) -> None:
    config, cache = section(write(tmp_path, 300, kind)), tmp_path / "run" / "prompts"
    unnamed, first = load(config, None), load(config, cache)
    (name,) = tables(cache)
    written = {path.name: path.stat().st_mtime_ns for path in (cache / name).iterdir()}
    again = load(config, cache)
    assert {path.name: path.stat().st_mtime_ns for path in (cache / name).iterdir()} == written
    for source in (first, again):
        assert [source.batch(t) for t in range(40)] == [unnamed.batch(t) for t in range(40)]
        assert source.digests == unnamed.digests and source.longest == unnamed.longest
    row = unnamed.batch(0).prompts[0].row
    assert row["more"]["a"] == [int(row["answer"])]


def test_what_was_left_out_is_reported_at_every_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1 2 3"}\n{"prompt": "1"}\n')
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load(section(path, max_prompt_tokens=2, prompts_per_batch=1), tmp_path / "cache")
        assert "1 of 2 prompts have more than prompts.max_prompt_tokens = 2 tokens (longest: 3): rows 0" in caplog.text


@pytest.mark.parametrize(
    "change", [{"max_prompt_tokens": 5}, {"chat_template": True}, {"columns": {"answer": "prompt"}}, "rows", "moved"]
)
def test_another_table_takes_the_place_of_one_that_does_not_fit(tmp_path: Path, change: Any) -> None:
    source, cache = write(tmp_path, 20), tmp_path / "cache"
    load(section(source), cache)
    before = tables(cache)
    (cache / ".of-one-that-died.partial").mkdir()
    if change == "rows":
        write(tmp_path, 20, first=1)
    elif change == "moved":
        source = source.rename(tmp_path / "elsewhere.jsonl")
    load(section(source, **(change if isinstance(change, dict) else {})), cache)
    assert len(tables(cache)) == 1
    assert (tables(cache) == before) == (change == "moved")


@pytest.mark.parametrize("place", ["cache", "elsewhere"])
def test_a_full_disk_is_named_and_leaves_nothing_behind(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, cache = section(write(tmp_path, 3000, "parquet")), tmp_path / "cache"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with largest_file(20_000), pytest.raises(WriteFailed, match=r"cannot write '.*': File too large; make room there"):
        load(config, cache if place == "cache" else None)
    left = {path.name for path in tmp_path.iterdir()} - {"rows.parquet", "cache"}
    assert not left and (place != "cache" or tables(cache) == [])
    assert len(load(config, cache)) == 3000


def test_a_file_that_changes_under_a_run_is_noticed_and_one_that_is_replaced_is_read_on(tmp_path: Path) -> None:
    path = write(tmp_path, 50)
    source = load(section(path), None)
    expected = source.batch(0)
    replacement = tmp_path / "new"
    replacement.write_text("nothing")
    replacement.rename(path)
    assert source.batch(0) == expected
    path = write(tmp_path, 50)
    source = load(section(path), None)
    with path.open("a") as file:
        file.write("\n")
    with pytest.raises(ConfigError, match=r"rows.jsonl has changed since the run began to read it"):
        source.batch(0)


def _load_in_process(path: Path, cache: Path, done: Any) -> None:
    done.put(load(section(path), cache).digests)


@pytest.mark.distributed
def test_leaders_that_start_at_once_write_it_once(tmp_path: Path) -> None:
    path, cache = write(tmp_path, 5000), tmp_path / "cache"
    context = multiprocessing.get_context("spawn")
    done = context.Queue()
    leaders = [context.Process(target=_load_in_process, args=(path, cache, done)) for _ in range(3)]
    for leader in leaders:
        leader.start()
    digests = [done.get(timeout=120) for _ in leaders]
    for leader in leaders:
        leader.join(30)
    assert digests[0] == digests[1] == digests[2] and len(tables(cache)) == 1


@pytest.mark.nightly
@pytest.mark.computes
@pytest.mark.parametrize("kind", ["jsonl", pytest.param("parquet", marks=pytest.mark.nightly)])
def test_memory_does_not_grow_with_the_rows(tmp_path: Path, kind: str) -> None:
    peaks = []
    for num in (4000, 24_000):
        path = write(tmp_path, num, kind)
        tracemalloc.start()
        table = load_prompts(section(path), word_tokenizer(), 0)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(table) == num
    # As objects, a row takes 1,000 bytes; footers of Parquet and Arrow files have some for each block of rows.
    assert peaks[1] - peaks[0] < 20_000 * 100


def test_no_descriptor_stays_open_of_files_that_only_had_to_be_read(tmp_path: Path) -> None:
    path = write(tmp_path, 20)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(20):
        load_prompts(section(path), word_tokenizer(), 0)
    assert len(os.listdir("/proc/self/fd")) < before + 20  # noqa: PTH208


def test_the_same_size_and_time_do_not_hide_a_change_and_other_names_are_none(tmp_path: Path) -> None:
    path = write(tmp_path, 50)
    source = load(section(path), tmp_path / "cache")
    expected, state = source.batch(0), path.stat()
    path.chmod(0o600)
    os.link(path, tmp_path / "other")
    assert source.batch(0) == expected
    with path.open("r+b") as file:
        file.write(path.read_bytes().replace(b'"answer": "7"', b'"answer": "8"'))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    with pytest.raises(ConfigError, match=r"rows.jsonl has changed since the run began to read it"):
        source.batch(0)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_a_file_that_changes_while_it_is_tokenized_gives_no_table(tmp_path: Path, kind: str, how: str) -> None:
    path, cache = write(tmp_path, 3000, kind), tmp_path / "cache"
    other = write(tmp_path / "..", 3000, kind, first=1) if how == "replaced" else None

    class Slow:
        """A tokenizer during whose work the rows change."""

        backend_tokenizer = word_tokenizer().backend_tokenizer
        chat_template = None

        def __call__(self, text: list[str], **options: Any) -> Any:
            if other is not None and other.exists():
                other.rename(path)
            elif other is None:
                content = path.read_bytes()
                with path.open("r+b") as file:
                    file.write(content)
                    file.write(b" " if kind == "jsonl" else b"")
            return word_tokenizer()(text, **options)

    config = section(path)
    if kind == "jsonl" and how == "replaced":
        # Everything is read from the file that was opened first.
        source = PromptSource.load(config, Slow(), 0, cache)  # type: ignore[arg-type]
        assert {prompt.row["answer"] for prompt in source.batch(0).prompts.values()} <= {str(i) for i in range(3000)}
        assert all(
            prompt.row["prompt"].split()[0] == prompt.row["answer"] for prompt in source.batch(1).prompts.values()
        )
        return
    with pytest.raises(ConfigError, match="has changed"):
        PromptSource.load(config, Slow(), 0, cache)  # type: ignore[arg-type]
    assert tables(cache) == []


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("damage", ["truncated", "longer", "one bit", "missing", "empty"])
def test_a_damaged_table_is_written_again(
    tmp_path: Path, kind: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    config, cache = section(write(tmp_path, 50, kind)), tmp_path / "cache"
    expected = load(config, cache).batch(0)
    (name,) = tables(cache)
    for file in sorted(path.name for path in (cache / name).iterdir()):
        path = cache / name / file
        content = bytearray(path.read_bytes())
        if not content:
            continue
        if damage == "one bit":
            content[len(content) // 2] ^= 1
        changed = {"truncated": content[:-8], "longer": content + bytes(8), "one bit": content, "empty": b""}
        path.unlink() if damage == "missing" else path.write_bytes(changed[damage])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert load(config, cache).batch(0) == expected
        # A bit of a report that is still JSON is no other table.
        assert "is damaged: prompts of" in caplog.text or file == "table.json"
        assert tables(cache) == [name]


def test_special_tokens_of_the_template_are_part_of_what_a_table_is_of(tmp_path: Path) -> None:
    config, cache = section(write(tmp_path, 20), chat_template=True), tmp_path / "cache"
    lengths = []
    for token in ("5", "5 6 7"):
        tokenizer = copy.deepcopy(word_tokenizer())
        tokenizer.bos_token = token
        tokenizer.chat_template = "{{ bos_token }} {{ messages[0].content }}"
        lengths.append(PromptSource.load(config, tokenizer, 0, cache).longest.token_ids)
    assert lengths[1][:3] == (5, 6, 7) and lengths[0] != lengths[1]


def test_rows_that_are_in_memory_only_share_no_table(tmp_path: Path) -> None:
    assert TabularRows(lambda num: (None, iter(())), []).identity() is None


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["jsonl", pytest.param("parquet", marks=pytest.mark.nightly)])
def test_a_start_that_is_killed_at_any_time_leaves_no_wrong_table(tmp_path: Path, kind: str) -> None:
    config, cache = section(write(tmp_path, 8_000, kind)), tmp_path / "cache"
    expected = load(config, None)

    def start(directory: Path) -> Any:
        process = multiprocessing.get_context("fork").Process(target=load, args=(config, directory))
        process.start()
        return process

    begun_s = time.monotonic()
    undisturbed = start(tmp_path / "other")
    undisturbed.join(60)
    assert undisturbed.exitcode == 0
    whole_s = time.monotonic() - begun_s
    num_partial = 0
    for share in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9):
        # Two at once, of which one waits for the other: leaders on one host.
        starts = [start(cache) for _ in range(2)]
        time.sleep(share * whole_s)
        num_partial += cache.is_dir() and any(path.name.endswith(".partial") for path in cache.iterdir())
        for process in starts:
            process.kill()
            process.join()
    assert num_partial > 0, "no kill met a table that was being written"
    for source in (load(config, cache), load(config, cache)):
        assert source.digests == expected.digests
        assert [source.batch(t) for t in range(5)] == [expected.batch(t) for t in range(5)]
    assert not any(path.name.endswith(".partial") for path in cache.iterdir())
