"""Whether a run may write where it is told to; nothing is made."""

import os
from pathlib import Path

import pytest

from async_rl.checks.preflight import require_paths, require_sound
from async_rl.errors import ConfigError, RunDirInUse
from async_rl.shared.locks.run_lock import lock_run
from tests.support.minimal_config import config_of


def require(run_dir: Path, snapshot_dir: Path | None = None) -> None:
    publish = {} if snapshot_dir is None else {"snapshot_dir": str(snapshot_dir)}
    require_paths(config_of(run={"dir": str(run_dir)}, publish=publish))


@pytest.mark.parametrize("place", ["", "new", "new/deeper/still"])
def test_a_directory_that_is_there_or_can_be_made_will_do_and_is_not_made(tmp_path: Path, place: str) -> None:
    require(tmp_path / place, tmp_path / place)
    assert list(tmp_path.iterdir()) == []


def test_a_relative_directory_is_one_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    require(Path("runs/one"))
    Path("runs").write_text("x")
    with pytest.raises(ConfigError, match=r"run\.dir is 'runs/one', but 'runs' is a file|but '.*/runs' is a file"):
        require(Path("runs/one"))


@pytest.mark.parametrize("place", ["file", "file/below", "file/below/it"])
@pytest.mark.parametrize("key", ["run.dir", "publish.snapshot_dir"])
def test_a_file_on_the_way_is_named(tmp_path: Path, key: str, place: str) -> None:
    (tmp_path / "file").touch()
    keys = ("run.dir", "publish.snapshot_dir")
    places = [tmp_path / (place if name == key else "good") for name in keys]
    with pytest.raises(ConfigError, match=rf"{key} is '.*', but '.*/file' is a file: name a directory"):
        require(*places)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_of_somebody_else_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=r"run\.dir is .* cannot be written to by this user: name another directory"):
        require(tmp_path / "run")


@pytest.mark.parametrize("key", ["run.dir", "model.path", "reward.name", "publish.snapshot_dir"])
def test_a_path_that_is_too_long_is_named(tmp_path: Path, key: str) -> None:
    section, _, name = key.partition(".")
    long = str(tmp_path / ("x" * 300))
    value = f"python:{long}.py:score" if key == "reward.name" else long
    with pytest.raises(ConfigError, match=r"x{300}.* cannot be read: File name too long; name another path"):
        require_sound(config_of(**{section: {name: value}}), trains=True, serves=True)


def test_a_run_that_has_not_ended_is_named_before_its_records(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with lock_run(tmp_path), pytest.raises(RunDirInUse, match="is in use by another run"):
        require(tmp_path)
