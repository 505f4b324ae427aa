"""Files that are written whole or not at all, on disks that are full, gone or closed to us."""

import errno
import io
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import WriteFailed
from async_rl.shared import files
from async_rl.shared.files import append_lines, replace_directory, write_file
from tests.support.full_disk import largest_file


@pytest.mark.parametrize("content", ["é\n", b"\x00\xff", ""])
def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "record.json"
    for old in (None, "what was there before"):
        if old is not None:
            path.write_text(old)
        write_file(path, content)
        assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
        assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]


def test_a_full_disk_leaves_the_old_file_and_is_named_with_its_remedy(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text("old")
    with largest_file(1000), pytest.raises(WriteFailed, match=r"cannot write '.*record\.json': .*make room.*resume"):
        write_file(path, "new" * 1000)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]


def test_lines_are_added_and_a_full_disk_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_lines(path, ["one", "two"])
    append_lines(path, ["three"])
    assert path.read_text() == "one\ntwo\nthree\n"
    if Path("/dev/full").exists():
        with pytest.raises(WriteFailed, match=r"'/dev/full': No space left on device; make room there \("):
            append_lines(Path("/dev/full"), ["four"])


def test_lines_after_a_full_disk_continue_no_broken_one(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    append_lines(path, ["one"])
    with largest_file(100), pytest.raises(WriteFailed, match="make room"):
        append_lines(path, ["two" * 10, "three" * 100])
    append_lines(path, ["four"])
    assert path.read_text() == "one\nfour\n"


@pytest.mark.parametrize(
    "write", [lambda p: write_file(p, "x\n"), lambda p: append_lines(p, ["x"])], ids=["file", "lines"]
)
@pytest.mark.parametrize(("code", "is_passing"), [(errno.EMFILE, True), (errno.EPERM, True), (errno.ENOENT, False)])
def test_what_a_moment_mends_ends_nothing(
    write: Callable[[Path], None], code: int, is_passing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[float] = []
    opened = Path.open

    def failing(path: Path, *arguments: Any, **options: Any) -> Any:
        times.append(time.monotonic())
        if times[-1] - times[0] < 0.5:
            raise OSError(code, os.strerror(code))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", failing)
    if is_passing:
        write(tmp_path / "record")
        monkeypatch.undo()
        assert (tmp_path / "record").read_text() == "x\n"
        return
    with pytest.raises(WriteFailed, match="No such file"):
        write(tmp_path / "record")
    assert len(times) == 1


def test_what_does_not_pass_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PATIENCE_S", 0.3)
    monkeypatch.setattr(Path, "open", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EMFILE, "too many files")))
    with pytest.raises(WriteFailed, match="too many files"):
        append_lines(tmp_path / "record", ["x"])


def test_lines_that_may_be_there_in_part_are_not_added_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class HalfWritten(io.FileIO):
        def write(self, data: Any) -> int:
            super().write(bytes(data[:2]))
            raise OSError(errno.EAGAIN, "try again")

        def truncate(self, size: int | None = None) -> int:
            raise OSError(errno.EINVAL, "it cannot be cut")

    monkeypatch.setattr(Path, "open", lambda path, *_, **__: HalfWritten(str(path), "a"))
    with pytest.raises(WriteFailed, match="try again"):
        append_lines(tmp_path / "record", ["abcdef"])
    monkeypatch.undo()
    assert (tmp_path / "record").read_text() == "ab"


def test_a_directory_takes_the_name_of_an_older_one(tmp_path: Path) -> None:
    for name in ("new", "final"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    replace_directory(tmp_path / "new", tmp_path / "final")
    assert [path.name for path in tmp_path.rglob("*")] == ["final", "new"]


def test_what_is_replaced_is_never_there_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it removes the old one, which takes its time; the next attempt leaves nothing of that."""
    for name in ("new", "final"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()

    def killed(path: Path, **_: object) -> None:
        if path.exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", killed)
        replace_directory(tmp_path / "new", tmp_path / "final")
    assert not (tmp_path / "final").exists()
    replace_directory(tmp_path / "new", tmp_path / "final")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["final", "new"]


@pytest.mark.parametrize("write", [lambda path: write_file(path, ""), lambda path: append_lines(path, [""])])
def test_a_directory_that_is_gone_is_named(tmp_path: Path, write: Callable[[Path], None]) -> None:
    with pytest.raises(WriteFailed, match=r"'.*gone/file': No such file or directory; check that its directory is"):
        write(tmp_path / "gone" / "file")


def test_what_is_written_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    sync, replace, here = os.fsync, Path.replace, threading.get_ident()

    def note(name: str) -> None:
        # Threads of other tests, such as those of leases, may write files of their own.
        if threading.get_ident() == here:
            calls.append(name)

    monkeypatch.setattr(os, "fsync", lambda descriptor: (note("fsync"), sync(descriptor))[1])
    monkeypatch.setattr(Path, "replace", lambda a, b: (note("replace"), replace(a, b))[1])
    write_file(tmp_path / "file", "content")
    assert calls == ["fsync", "replace", "fsync"]
