"""One version of the weights as a safetensors file for instances: written as a stream, never whole in memory.

A publish feeds a `SnapshotWriter` as the tensors pass; the file is not visible before it is complete. Instances open
it with `read_snapshot`.
"""

import json
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from async_rl.errors import ConfigError, PublishError
from async_rl.shared.weights.fingerprint import Fingerprint, Stream, TensorSpec
from async_rl.shared.weights.host_pieces import HostPieces

DTYPE_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""safetensors' names of torch's dtypes."""

ALIGNMENT = 8
"""The data starts at a multiple of it, so that a mapped tensor of any dtype is aligned."""


class SnapshotWriter:
    """Writes the tensors of `specs`, in any order, under a hidden name; `commit` renames the file.

    Tensors are ordered by decreasing dtype size, which keeps each of them aligned, then in stream order.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        self.path = path
        self._hidden_path = path.with_name(f".{path.name}")
        self._missing = {spec.name for spec in specs}
        self._host_pieces = HostPieces()
        header, self._starts = _layout(specs)
        self._file: BinaryIO | None = None
        try:
            self._file = self._hidden_path.open("wb", buffering=0)
            self._write(header)
        except OSError as error:
            raise self._cannot_write(error) from error

    def tee(
        self, stream: Stream, fingerprint: Fingerprint | None = None
    ) -> Generator[tuple[TensorSpec, torch.Tensor], None, None]:
        """Yields the stream unchanged, each tensor after it was written; closing it closes the stream.

        What is written is added to `fingerprint`.

        Raises:
            ConfigError: the file cannot be written.
        """
        items = iter(stream)
        try:
            for spec, tensor in items:
                data = tensor.detach().contiguous().view(-1).view(torch.uint8)
                written = self._write_tensor(spec, self._host_pieces.of(data))
                if fingerprint is not None:
                    fingerprint.add_pieces(spec, written)
                for _ in written:
                    pass
                yield spec, tensor
        finally:
            if isinstance(items, Generator):
                items.close()

    def write(self, stream: Stream) -> str:
        """Writes a whole stream and returns its fingerprint; raises as `tee` does."""
        fingerprint = Fingerprint()
        with closing(self.tee(stream, fingerprint)) as items:
            for _ in items:
                pass
        return fingerprint.hexdigest()

    def commit(self) -> Path:
        """Closes the file and gives it its final name."""
        assert self._file is not None, "a snapshot is committed once"
        assert not self._missing, f"snapshot {self.path} lacks {len(self._missing)} tensors: {min(self._missing)!r} ..."
        self._file.close()
        self._file = None
        try:
            self._hidden_path.replace(self.path)
        except OSError as error:
            raise self._cannot_write(error) from error
        return self.path

    def discard(self) -> None:
        """Removes an unfinished file; does nothing after `commit` or when called again."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._hidden_path.unlink(missing_ok=True)

    def _write_tensor(self, spec: TensorSpec, pieces: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Writes one tensor, given as its bytes on the host, and yields each piece after it was written."""
        assert self._file is not None, "the snapshot was committed or discarded"
        self._missing.remove(spec.name)
        try:
            self._file.seek(self._starts[spec.name])
            for piece in pieces:
                self._write(piece.numpy().data)
                yield piece
        except OSError as error:
            raise self._cannot_write(error) from error

    def _write(self, data: bytes | memoryview) -> None:
        """Writes all of it: one system call writes 2 GiB at most."""
        assert self._file is not None
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def _cannot_write(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"cannot write the weight snapshot {str(self.path)!r}: {error.strerror}; publish.snapshot_dir needs a "
            "directory that this process may write to, with room for two snapshots"
        )


def read_snapshot(path: Path, specs: Sequence[TensorSpec]) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """Opens a snapshot, compares its header with `specs`, and only then returns their tensors, in that order.

    Tensors are views of the mapped file, on the host. The mapping outlives the file's name.

    Raises:
        PublishError: there is no such file, or it is incomplete, or it does not contain exactly these tensors.
    """
    try:
        with path.open("rb"):  # safetensors' own error for an unreadable file does not name it.
            pass
        snapshot: Any = safe_open(path, framework="pt")
        slices = {name: snapshot.get_slice(name) for name in snapshot.keys()}  # noqa: SIM118  # it is no dict
        found = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except (OSError, ValueError) as error:  # ValueError: no file can have this name
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise PublishError(
            f"cannot read the weight snapshot {str(path)!r}: {why}; publish.snapshot_dir must be a "
            "directory that this instance sees under the same path"
        ) from error
    except SafetensorError as error:
        raise PublishError(f"the weight snapshot {str(path)!r} is no whole safetensors file: {error}") from error
    expected = {spec.name: (_code(spec), spec.shape) for spec in specs}
    if found != expected:
        name = min(found.items() ^ expected.items())[0]
        raise PublishError(
            f"the weight snapshot {str(path)!r} has {_describe(found.get(name))} as tensor {name!r}, expected "
            f"{_describe(expected.get(name))}: it is of another model or another publish"
        )
    return ((spec, snapshot.get_tensor(spec.name)) for spec in specs)


def _layout(specs: Sequence[TensorSpec]) -> tuple[bytes, dict[str, int]]:
    """The file's first bytes (length of the header, and the header), and the offset of each tensor in the file."""
    entries: dict[str, object] = {}
    starts: dict[str, int] = {}
    end = 0
    for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):
        starts[spec.name] = end
        end += spec.num_bytes
        entries[spec.name] = {
            "dtype": _code(spec),
            "shape": list(spec.shape),
            "data_offsets": [starts[spec.name], end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}


def _code(spec: TensorSpec) -> str:
    code = DTYPE_CODES.get(spec.dtype_name)
    if code is None:
        raise ConfigError(
            f"tensor {spec.name!r} has dtype {spec.dtype_name!r}, for which snapshots have no name: expected one of "
            f"{', '.join(DTYPE_CODES)}"
        )
    return code


def _describe(entry: tuple[str, tuple[int, ...]] | None) -> str:
    return "nothing" if entry is None else f"{entry[0]} {list(entry[1])}"
