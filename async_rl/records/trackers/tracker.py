"""The interface of a tracker, and what it is told of the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Figures = Mapping[str, float]
"""Finite numbers by name; those of evaluations begin with `eval/`."""

EVALUATION = "eval/"

Row = Mapping[str, str | int | float | None]
"""One row of a table of samples; all rows have the keys of `SAMPLE_COLUMNS`."""

SAMPLE_COLUMNS = ("iteration", "index", "prompt_id", "prompt", "response", "reward", "num_tokens", "finish_reason")


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run as trackers show it.

    Attributes:
        run_dir: where a tracker without a place of its own keeps its files.
        project: what the tracker files the run under.
        name: of the run; several runs may have the same one.
        key: unique; a run that resumes has the same one again.
        first_step: where it begins, or resumes.
        config: without secrets.
    """

    run_dir: Path
    project: str
    name: str
    key: str
    first_step: int
    config: Mapping[str, Any]


class Tracker(Protocol):
    """Made, called and closed by one thread. Any exception is reported, and the run goes on."""

    def log(self, step: int, figures: Figures) -> None:
        """Adds figures of an iteration, or of its evaluation."""
        ...

    def log_samples(self, step: int, rows: Sequence[Row]) -> None:
        """Adds samples of an iteration, where the tracker has tables."""
        ...

    def close(self) -> None:
        """Sends what is left, and marks the run as ended."""
        ...
