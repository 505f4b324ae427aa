"""Rows of Hugging Face `datasets`: of a directory that `save_to_disk` wrote, or of the hub."""

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from async_rl.data.tabular_rows import TabularRows
from async_rl.errors import ConfigError
from async_rl.net.hub import hub_fault

HUB = "hf:"


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
