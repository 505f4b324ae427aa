"""Rows of Parquet files and of Hugging Face `datasets`, which can only be read in blocks.

For rows in any order there is a copy in Arrow's own format, in blocks of a few rows. It is read, not mapped: mapped
pages would count as memory of the process.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from async_rl.errors import ConfigError
from async_rl.rollouts.data.row import Row, without_nulls
from async_rl.shared.files import named_write_errors
from async_rl.shared.net.hub import hub_fault

HUB = "hf:"
COPY = "rows.arrow"

SCAN_ROWS = 1024

BLOCK_ROWS = 32
"""Rows of the copy that are read for one."""


class TabularRows:
    """Implements `Rows`; a place is the number of the row.

    Args:
        blocks: opens the source: its schema, and an iterator of record batches of at most so many rows.
        files: its files, whose contents identify it.
    """

    def __init__(self, blocks: Callable[[int], tuple[Any, Iterator[Any]]], files: Sequence[Path]) -> None:
        self._blocks = blocks
        self._files = files
        self._states: list[tuple[int, int, int]] | None = None
        self._copy: Any = None
        self._block: tuple[int, list[Row]] = -1, []

    def identity(self) -> str | None:
        """None of rows in memory only, which have no files."""
        if not self._files:
            return None
        self._states = self._now()
        digest = hashlib.sha256()
        for path in self._files:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def scan(self) -> Iterator[tuple[int, Row]]:
        self._states = self._states or self._now()
        schema, blocks = self._blocks(SCAN_ROWS)
        if twice := sorted({name for name in schema.names if schema.names.count(name) > 1}):
            raise ConfigError(f"{self._name} has several columns {twice[0]!r}: rename or drop all but one")
        place = 0
        for block in blocks:
            for row in self._as_rows(block, place):
                yield place, row
                place += 1

    def save(self, directory: Path) -> None:
        arrow = import_module("pyarrow")
        with named_write_errors(directory / COPY):
            schema, blocks = self._blocks(SCAN_ROWS)
            plain = arrow.schema([_without_dictionary(arrow, field) for field in schema])
            with arrow.ipc.new_file(str(directory / COPY), plain) as copy:
                for table in _of_equal_size(blocks if plain == schema else (block.cast(plain) for block in blocks)):
                    copy.write_batch(table)
        # Rows were read in `scan`, and now again.
        if self._now() != self._states:
            raise ConfigError(f"{self._name} has changed while it was read: start again when it is complete")

    def load(self, directory: Path) -> None:
        arrow = import_module("pyarrow")
        self._copy = arrow.ipc.open_file(arrow.OSFile(str(directory / COPY)))

    def row_at(self, place: int) -> Row:
        assert self._copy is not None, "rows are read before `load`"
        number, offset = divmod(place, BLOCK_ROWS)
        if number != self._block[0]:
            self._block = number, self._as_rows(self._copy.get_batch(number), number * BLOCK_ROWS)
        return self._block[1][offset]

    @property
    def _name(self) -> str:
        return ", ".join(map(str, self._files)) or "the data set"

    def _now(self) -> list[tuple[int, int, int]]:
        states = [path.stat() for path in self._files]
        return [(state.st_size, state.st_mtime_ns, state.st_ctime_ns) for state in states]

    def _as_rows(self, block: Any, first: int) -> list[Row]:
        """The rows of a block, the first of which has the number `first`."""
        try:
            return [without_nulls(row) for row in block.to_pylist()]
        # Arrow's own errors are ValueErrors; others are of times that Python does not have, and of broken texts.
        except (ValueError, OverflowError) as error:
            if block.num_rows > 1:
                return [row for i in range(block.num_rows) for row in self._as_rows(block.slice(i, 1), first + i)]
            raise ConfigError(
                f"{self._name}, row {first}: a value cannot be read: {error}; drop the column, or write it as text "
                "or number"
            ) from error


def parquet_rows(path: Path) -> TabularRows:
    # Imported here and above: programs that show their help, or read JSON lines, need not wait for it.
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")

    def blocks(max_rows: int) -> tuple[Any, Iterator[Any]]:
        try:
            file = parquet.ParquetFile(path.open("rb"))
            return file.schema_arrow, _checked(file.iter_batches(batch_size=max_rows))
        except arrow.ArrowException as error:
            raise _no_parquet(error) from error

    def _checked(batches: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from batches
        except arrow.ArrowException as error:
            raise _no_parquet(error) from error

    def _no_parquet(error: Exception) -> ConfigError:
        # pyarrow reads categories within lists and structs from one row group only.
        if "Nested data conversions" in str(error):
            return ConfigError(
                f"{path} has a column with categories (dictionary-encoded values) inside lists or structs, which "
                "cannot be read from several row groups: write them as plain values"
            )
        return ConfigError(f"{path} is not a Parquet file: {error}")

    return TabularRows(blocks, [path])


def _without_dictionary(arrow: Any, field: Any) -> Any:
    """The field with its values written out: the copy could have only one dictionary of a column, and each row group of
    a Parquet file has its own (of categories, as pandas and polars have them)."""
    return field.with_type(field.type.value_type) if arrow.types.is_dictionary(field.type) else field


def _of_equal_size(batches: Iterator[Any]) -> Iterator[Any]:
    """The same rows in record batches of `BLOCK_ROWS` each, and a last one; a source may end its blocks anywhere."""
    arrow = import_module("pyarrow")
    rest: list[Any] = []
    num_rest = 0
    for batch in batches:
        start = 0
        while batch.num_rows - start >= BLOCK_ROWS - num_rest:
            length = BLOCK_ROWS - num_rest
            yield _joined(arrow, [*rest, batch.slice(start, length)])
            start, rest, num_rest = start + length, [], 0
        if start < batch.num_rows:
            rest.append(batch.slice(start))
            num_rest += batch.num_rows - start
    if rest:
        yield _joined(arrow, rest)


def _joined(arrow: Any, batches: list[Any]) -> Any:
    return batches[0] if len(batches) == 1 else arrow.concat_batches(batches)


def saved_rows(source: str) -> TabularRows:
    """Those of a directory written by `Dataset.save_to_disk`.

    Raises:
        ConfigError: it is none, or has several splits, or `datasets` is not installed.
    """
    datasets = _library(source)
    try:
        loaded = datasets.load_from_disk(source)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"prompts.source {source!r} is a directory, but not one that `save_to_disk` of datasets wrote: {error}"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        raise ConfigError(
            f"prompts.source {source!r} has the splits {list(loaded)}: name one of these directories, as in "
            f"{str(Path(source) / next(iter(loaded)))!r}"
        )
    return _rows_of(loaded)


def hub_rows(source: str) -> TabularRows:
    """Those of `hf:OWNER/NAME[:CONFIG][:SPLIT]`; without a split, `train`, or the only one.

    Raises:
        ConfigError: there is no such dataset or split, or `datasets` is not installed.
    """
    datasets = _library(source)
    # A colon in brackets is a slice of a split, as in train[:100].
    name, *rest = re.split(r":(?![^\[]*\])", source.removeprefix(HUB))
    if not name or len(rest) > 2 or "" in rest:
        raise ConfigError(f"prompts.source is {source!r}: expected {HUB}OWNER/NAME[:CONFIG][:SPLIT]")
    config, split = rest if len(rest) == 2 else (None, rest[0] if rest else None)
    if (fault := hub_fault()) is not None:
        datasets.config.HF_HUB_OFFLINE = True
    try:
        if split is None:
            splits = datasets.get_dataset_split_names(name)
            split = splits[0] if len(splits) == 1 else "train"
        return _rows_of(datasets.load_dataset(name, config, split=split))
    # Of several libraries, for an unknown name, config or split, and for a hub that cannot be reached.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        if fault is not None:
            raise ConfigError(f"prompts.source {source!r} cannot be fetched from the hub: {fault}") from error
        raise ConfigError(
            f"prompts.source {source!r} cannot be fetched from the hub: {type(error).__name__}: {reason}; check "
            f"{HUB}OWNER/NAME[:CONFIG][:SPLIT] and the network"
        ) from error


def _library(source: str) -> Any:
    try:
        return import_module("datasets")
    except ImportError as error:
        raise ConfigError(f"prompts.source {source!r} needs datasets: install async-rl[datasets]") from error


def _rows_of(dataset: Any) -> TabularRows:
    def blocks(max_rows: int) -> tuple[Any, Iterator[Any]]:
        tables = dataset.with_format("arrow").iter(batch_size=max_rows)
        return dataset.features.arrow_schema, (batch for table in tables for batch in table.to_batches())

    return TabularRows(blocks, [Path(file["filename"]) for file in dataset.cache_files])
