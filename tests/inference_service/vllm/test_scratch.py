"""Temporary files of one vLLM; the whole course, with processes that are killed, is in `test_server.py`."""

import mmap
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from inference_service.vllm.scratch import MAX_PARENT_BYTES, PREFIX, SEGMENTS_FILE, Scratch


@pytest.fixture
def place() -> Iterator[Path]:
    """Short enough for sockets below it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


def test_it_is_removed_with_all_in_it_at_its_end(place: Path) -> None:
    with Scratch({"TMPDIR": str(place)}) as scratch:
        assert scratch.path.parent == place
        (scratch.path / "sockets").mkdir()
        (scratch.path / "sockets" / "one").write_text("")
    assert list(place.iterdir()) == []


def test_a_start_removes_what_was_abandoned_and_nothing_else(place: Path) -> None:
    abandoned, others = place / f"{PREFIX}old", place / "of-others"
    for folder in (abandoned, others):
        folder.mkdir()
        (folder / "file").write_text("")
    with Scratch({"TMPDIR": str(place)}) as first, Scratch({"TMPDIR": str(place)}) as second:
        assert not abandoned.exists() and others.exists()
        assert first.path.exists() and second.path.exists(), "the first is in use"


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory has names in /dev/shm on Linux only")
def test_segments_that_processes_had_mapped_go_with_it_and_files_of_others_stay(place: Path) -> None:
    names = [f"{prefix}{secrets.token_hex(4)}" for prefix in ("psm_", "sem.mp-", "model_")]
    shared, semaphore, model = (Path("/dev/shm") / name for name in names)
    try:
        with Scratch({"TMPDIR": str(place)}) as scratch, ExitStack() as mapped:
            for path in (shared, semaphore, model):
                # As glibc makes a semaphore: mapped under another name, which is removed.
                first = path.with_name(f"sem.{secrets.token_hex(3)}")
                first.write_bytes(b"8 bytes.")
                with first.open("r+b") as file:
                    mapped.enter_context(mmap.mmap(file.fileno(), 8))
                path.hardlink_to(first)
                first.unlink()
            scratch.note_segments([os.getpid(), 2**30])
            assert (scratch.path / SEGMENTS_FILE).read_text().splitlines() == [str(shared), str(semaphore)]
        assert not shared.exists() and not semaphore.exists() and model.exists()
    finally:
        model.unlink()


def test_a_record_that_somebody_forged_removes_no_file(place: Path) -> None:
    abandoned, kept = place / f"{PREFIX}old", place / "kept"
    abandoned.mkdir()
    kept.write_text("")
    (abandoned / SEGMENTS_FILE).write_text(f"{kept}\n/dev/shm/psm_/../../..{kept}\n")
    with Scratch({"TMPDIR": str(place)}):
        assert kept.exists() and not abandoned.exists()


def test_under_a_long_tmpdir_sockets_would_have_too_long_names(tmp_path: Path) -> None:
    long = tmp_path / ("x" * MAX_PARENT_BYTES)
    long.mkdir()
    with Scratch({"TMPDIR": str(long)}) as scratch:
        assert scratch.path.parent == Path("/tmp")
