"""Snapshots keep every bit, appear only when whole, and leave nothing behind."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from async_rl.errors import ConfigError, PublishError
from async_rl.shared.weights.fingerprint import Fingerprint, TensorSpec
from async_rl.shared.weights.snapshot import DTYPE_CODES, SnapshotWriter, read_snapshot

Item = tuple[TensorSpec, torch.Tensor]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def make_items() -> list[Item]:
    """One tensor of random bits for every dtype, odd sizes first, and some special shapes."""
    random = torch.Generator().manual_seed(0)
    items = []
    for name in ("bool", "uint8", *DTYPE_CODES):
        dtype = getattr(torch, name)
        raw = torch.randint(0, 2 if name == "bool" else 256, (15 * dtype.itemsize,), generator=random)
        tensor = raw.to(torch.uint8).view(dtype).view(5, 3)
        items.append((TensorSpec(f"{len(items)}.{name}", name, (5, 3)), tensor))
    items.append((TensorSpec("scalar", "float32", ()), torch.tensor(-0.0)))
    items.append((TensorSpec("empty", "bfloat16", (0, 4)), torch.empty(0, 4, dtype=torch.bfloat16)))
    items.append((TensorSpec("transposed", "float32", (3, 2)), torch.arange(6.0).view(2, 3).T))
    return items


def specs_of(items: list[Item]) -> list[TensorSpec]:
    return [spec for spec, _ in items]


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def write(path: Path, items: list[Item]) -> str:
    writer = SnapshotWriter(path, specs_of(items))
    fingerprint = writer.write(items)
    writer.commit()
    return fingerprint


def test_every_bit_comes_back_in_stream_order_and_any_reader_takes_the_file(tmp_path: Path) -> None:
    items = make_items()
    expected = Fingerprint()
    for spec, tensor in items:
        expected.add(spec, bits(tensor))
    path = tmp_path / "snapshot.safetensors"
    assert write(path, items) == expected.hexdigest()
    read = list(read_snapshot(path, specs_of(items)))
    assert specs_of(read) == specs_of(items)
    for (spec, tensor), (_, original) in zip(read, items, strict=True):
        assert (tensor.dtype, tuple(tensor.shape)) == (spec.dtype, spec.shape)
        assert torch.equal(bits(tensor), bits(original))
    assert set(load_file(path)) == {spec.name for spec in specs_of(items)}


def test_a_tee_yields_the_very_tensors_and_the_file_has_no_name_before_it_is_whole(tmp_path: Path) -> None:
    items = make_items()
    writer = SnapshotWriter(tmp_path / "snapshot.safetensors", specs_of(items))
    for (_, tensor), (_, original) in zip(writer.tee(iter(items)), items, strict=True):
        assert tensor is original
        assert not writer.path.exists()
    writer.commit()
    assert names(tmp_path) == {"snapshot.safetensors"}


def test_a_stream_that_breaks_is_closed_and_leaves_no_file(tmp_path: Path) -> None:
    items = make_items()
    closed = []

    def stream() -> Iterator[Item]:
        try:
            yield from items[:2]
            raise ValueError("cannot export")
        finally:
            closed.append(True)

    path = tmp_path / "snapshot.safetensors"
    broken = SnapshotWriter(path, specs_of(items))
    with pytest.raises(ValueError, match="cannot export"):
        broken.write(stream())
    assert closed
    broken.discard()
    left = SnapshotWriter(path, specs_of(items))
    early = left.tee(stream())
    next(early)
    early.close()
    assert len(closed) == 2
    left.discard()
    assert names(tmp_path) == set()


def test_a_snapshot_that_is_missing_or_cut_off_is_named(tmp_path: Path) -> None:
    items = make_items()
    path = tmp_path / "snapshot.safetensors"
    with pytest.raises(PublishError, match=r"cannot read .*snapshot\.safetensors.*No such file.*same path"):
        read_snapshot(path, specs_of(items))
    write(path, items)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(PublishError, match="no whole safetensors file"):
        read_snapshot(path, specs_of(items))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (TensorSpec("scalar", "float32", (1,)), r"F32 \[\] as tensor 'scalar', expected F32 \[1\]"),
        (TensorSpec("scalar", "int32", ()), r"F32 \[\] as tensor 'scalar', expected I32 \[\]"),
        (TensorSpec("a", "int32", ()), r"nothing as tensor 'a', expected I32"),
    ],
)
def test_a_snapshot_of_other_tensors_is_refused(tmp_path: Path, spec: TensorSpec, words: str) -> None:
    items = make_items()
    path = tmp_path / "snapshot.safetensors"
    write(path, items)
    others = [spec if old.name == "scalar" else old for old in specs_of(items)]
    with pytest.raises(PublishError, match=words):
        read_snapshot(path, others)
    with pytest.raises(PublishError, match="'transposed', expected nothing"):
        read_snapshot(path, specs_of(items)[:-1])


def test_a_directory_that_cannot_take_the_file_is_a_fault_of_the_settings(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no device that is always full")
    (tmp_path / ".snapshot.safetensors").symlink_to(full)
    with pytest.raises(ConfigError, match=os.strerror(errno.ENOSPC)):
        SnapshotWriter(tmp_path / "snapshot.safetensors", specs_of(make_items()))


def test_a_dtype_without_a_name_in_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'complex64', for which snapshots have no name"):
        SnapshotWriter(tmp_path / "snapshot.safetensors", [TensorSpec("a", "complex64", (1,))])
