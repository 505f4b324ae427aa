"""Checkpoint directories: their names, the manifest that tells whether one is whole, and what is removed."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.errors import ConfigError
from async_rl.shared.checkpoint_names import newest_checkpoint, whole_checkpoints
from trainer.checkpoint.files import (
    MANIFEST,
    checkpoint_path,
    damaged,
    file_sums,
    find_damage,
    keep_newest,
    partial_path,
    read_manifest,
    remove_partial,
    seal,
)

ITERATIONS = st.sets(st.integers(0, 10**8), max_size=6)
"""More than six digits, too: names then no longer sort as numbers do."""
FILES = st.dictionaries(st.sampled_from(["a", "b.distcp", "c"]), st.binary(min_size=1, max_size=40), min_size=1)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@contextmanager
def fresh_directory() -> Iterator[Path]:
    """Of each generated case: `tmp_path` is one for all of them."""
    with TemporaryDirectory() as path:
        yield Path(path)


def write(directory: Path, iteration: int, files: dict[str, bytes], **content: Any) -> Path:
    """A whole checkpoint."""
    partial, final = partial_path(directory, iteration), checkpoint_path(directory, iteration)
    partial.mkdir(parents=True)
    for name, data in files.items():
        (partial / name).write_bytes(data)
    seal(partial, final, {**content, "files": file_sums(partial, files)})
    return final


@settings(max_examples=40)
@given(ITERATIONS)
def test_whole_checkpoints_are_in_the_order_of_their_iterations_and_nothing_else_is_one(iterations: set[int]) -> None:
    with fresh_directory() as directory:
        for iteration in iterations:
            checkpoint_path(directory, iteration).mkdir()
        for name in ("iteration-1", "iteration-000001x", ".iteration-000009.partial", "else"):
            (directory / name).mkdir()
        expected = [checkpoint_path(directory, iteration) for iteration in sorted(iterations)]
        assert list(whole_checkpoints(directory)) == expected
        assert newest_checkpoint(directory) == (expected[-1] if expected else None)
    assert list(whole_checkpoints(directory)) == [], "there is no such directory any more"


@settings(max_examples=40)
@given(ITERATIONS, st.integers(1, 8))
def test_the_newest_are_kept_and_nothing_is_left_of_the_others(iterations: set[int], num_kept: int) -> None:
    with fresh_directory() as directory:
        for iteration in iterations:
            checkpoint_path(directory, iteration).mkdir()
            (checkpoint_path(directory, iteration) / "file").touch()
        keep_newest(directory, num_kept)
        kept = {checkpoint_path(directory, iteration) for iteration in sorted(iterations)[-num_kept:]}
        assert set(directory.iterdir()) == kept


def test_what_killed_runs_left_is_removed_and_whole_checkpoints_are_not(tmp_path: Path) -> None:
    whole = write(tmp_path, 7, {"a": b"1"})
    partial_path(tmp_path, 8).mkdir()
    (tmp_path / f".{whole.name}.removed").mkdir()  # killed in the middle of `keep_newest`
    remove_partial(tmp_path)
    assert list(tmp_path.iterdir()) == [whole]


@settings(max_examples=20)
@given(st.dictionaries(st.text().filter(lambda name: name not in ("files", "format")), JSON, max_size=4), FILES)
def test_a_manifest_says_what_was_sealed_and_finds_no_damage(content: dict[str, Any], files: dict[str, bytes]) -> None:
    with fresh_directory() as directory:
        path = write(directory, 3, files, content=content)
        manifest = read_manifest(path)
        assert manifest["content"] == content
        assert not partial_path(directory, 3).exists()
        assert find_damage(path, manifest["files"]) is None


@settings(max_examples=30)
@given(FILES, st.data())
def test_any_change_of_a_file_is_found_and_named(files: dict[str, bytes], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(files)))
    before = files[name]
    place = data.draw(st.integers(0, len(before) - 1))
    other_byte = bytes([before[place] ^ data.draw(st.integers(1, 255))])
    after = data.draw(
        st.sampled_from([None, before[:place], before + b"\0", before[:place] + other_byte + before[place + 1 :]])
    )
    with fresh_directory() as directory:
        path = write(directory, 3, files)
        if after is None:
            (path / name).unlink()
        else:
            (path / name).write_bytes(after)
        error = find_damage(path, read_manifest(path)["files"])
        assert error is not None and f"{str(path)!r} is damaged: {name} " in str(error)


@settings(max_examples=30)
@given(st.data())
def test_an_altered_manifest_is_refused(data: st.DataObject) -> None:
    with fresh_directory() as directory:
        path = write(directory, 3, {"a": b"1"}, seed=3, numbers=[0.5, None])
        text = (path / MANIFEST).read_bytes()
        place = data.draw(st.integers(0, len(text) - 1))
        changed = text[:place] + bytes([text[place] ^ data.draw(st.integers(1, 127))]) + text[place + 1 :]
        if _same_json(changed, text):
            return  # other white space
        (path / MANIFEST).write_bytes(changed)
        with pytest.raises(ConfigError, match=f"is damaged: {MANIFEST} "):
            read_manifest(path)


def _same_json(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"content": {}}', b"\xff", b'{"content": [], "xxh3": "0"}'])
def test_what_is_no_manifest_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(text)
    with pytest.raises(ConfigError, match=f"is damaged: {MANIFEST} "):
        read_manifest(tmp_path)
    with pytest.raises(ConfigError, match=f"{MANIFEST} cannot be read .FileNotFoundError"):
        read_manifest(tmp_path / "missing")


def test_a_checkpoint_of_another_format_is_refused_as_such(tmp_path: Path) -> None:
    path = write(tmp_path, 3, {"a": b"1"}, format=99)
    with pytest.raises(ConfigError, match="has format 99, expected 1: use the version of async-rl that wrote it"):
        read_manifest(path)


def test_a_checkpoint_replaces_the_one_of_the_same_iteration(tmp_path: Path) -> None:
    """The run went back to an older one and came here again."""
    write(tmp_path, 3, {"a": b"before", "b.distcp": b"before"})
    path = write(tmp_path, 3, {"a": b"after"})
    assert sorted(file.name for file in path.iterdir()) == ["a", MANIFEST]
    assert (path / "a").read_bytes() == b"after"


def test_the_remedy_for_damage_names_the_checkpoint_before_it(tmp_path: Path) -> None:
    paths = [write(tmp_path, iteration, {"a": b"1"}) for iteration in (2, 4, 1_000_000)]
    remedies = [str(damaged(path, "a", "is missing")).partition("Remove the directory; ")[2] for path in paths]
    assert remedies == [
        "there is none before it, so the run starts anew",
        "the one before it is iteration-000002",
        "the one before it is iteration-000004",
    ]
    # A run that goes on may have removed it by now.
    gone = tmp_path / "iteration-000003"
    assert "the one before it is iteration-000002" in str(damaged(gone, "a", "is missing"))
