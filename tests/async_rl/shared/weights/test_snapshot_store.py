"""The snapshots of a run: at most two, whole ones only, and nothing is left behind or taken from another run."""

import os
from pathlib import Path
from random import Random

import pytest
import torch

from async_rl.errors import ConfigError
from async_rl.shared.weights.fingerprint import TensorSpec
from async_rl.shared.weights.snapshot import read_snapshot
from async_rl.shared.weights.snapshot_store import SnapshotStore

SPEC = TensorSpec("a", "float32", (2,))


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def value_in(path: Path) -> float:
    ((_, tensor),) = read_snapshot(path, [SPEC])
    return float(tensor[0])


def write(store: SnapshotStore, version: str, value: float = 0.0) -> Path:
    store.begin(version, [SPEC]).write([(SPEC, torch.full((2,), value))])
    return store.commit()


def kill(store: SnapshotStore) -> None:
    """What the system does with a process that is gone: its files stay, its locks do not."""
    store._lock.close()


def test_after_any_sequence_of_publishes_the_current_one_and_the_one_before_are_whole(tmp_path: Path) -> None:
    for seed in range(20):
        rng, directory = Random(seed), tmp_path / str(seed)
        store = SnapshotStore(directory, "run")
        committed: list[str] = []
        for number in range(12):
            version = rng.choice([f"v{number}", *committed[-1:]])
            writer = store.begin(version, [SPEC])
            del committed[:-1]  # the room of the one before last is needed now
            if rng.random() < 0.4:
                continue  # the publish failed; the next one begins in its place
            writer.write([(SPEC, torch.full((2,), float(number)))])
            path = store.commit()
            committed = [*(each for each in committed if each != version), version]
            assert path == directory.absolute() / f"run.{version}.safetensors" and value_in(path) == number
            kept = {f"run.{each}.safetensors" for each in committed[-2:]}
            assert kept <= names(directory) and names(directory) <= kept | {".run.lock"}
        store.close()
        store.close()
        assert names(directory) == set()


def test_who_reads_a_snapshot_reads_on_when_it_is_removed(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, "run")
    reading = read_snapshot(write(store, "v0", 7.0), [SPEC])
    store.close()
    ((_, tensor),) = reading
    assert float(tensor[0]) == 7.0 and names(tmp_path) == set()


def test_a_store_removes_what_a_killed_run_left_and_nothing_of_those_that_live(tmp_path: Path) -> None:
    living, killed = SnapshotStore(tmp_path, "run"), SnapshotStore(tmp_path, "run2")
    write(living, "v0")
    write(killed, "v0")
    killed.begin("v1", [SPEC])
    for name in ("run2-notes", "run2.txt", "other.v0.safetensors", ".hidden"):
        (tmp_path / name).write_bytes(b"")
    kill(killed)
    before = names(tmp_path)
    assert {"run2.v0.safetensors", ".run2.v1.safetensors", ".run2.lock"} <= before
    SnapshotStore(tmp_path, "next").close()
    assert names(tmp_path) == before - {"run2.v0.safetensors", ".run2.v1.safetensors", ".run2.lock"}
    living.close()


def test_a_run_that_goes_on_under_its_name_begins_with_an_empty_directory(tmp_path: Path) -> None:
    first = SnapshotStore(tmp_path, "run")
    write(first, "v0")
    kill(first)
    second = SnapshotStore(tmp_path, "run")
    assert names(tmp_path) == {".run.lock"}
    write(second, "v1")
    second.close()


@pytest.mark.parametrize("place", ["file/dir", "file"])
def test_a_directory_that_cannot_be_made_is_a_fault_of_the_settings(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=rf"publish\.snapshot_dir '.*{place}'.*name a directory that can be made"):
        SnapshotStore(tmp_path / place, "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written_to_is_a_fault_of_the_settings(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=r"publish\.snapshot_dir .*Permission denied"):
        SnapshotStore(tmp_path, "run")


def test_a_commit_without_a_snapshot_is_our_own_mistake(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, "run")
    with pytest.raises(AssertionError, match="no snapshot was begun"):
        store.commit()
    store.close()
