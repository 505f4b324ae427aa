"""Hands every record, sample and evaluation to all trackers of a run; for the recorders."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from async_rl.records.trackers.tracker import EVALUATION, Row, Tracker
from async_rl.records.trackers.tracker_thread import TrackerThread


class Trackers:
    """From any thread; returns at once, except for `close`."""

    def __init__(self, threads: Sequence[TrackerThread] = ()) -> None:
        self._threads = threads

    def log_record(self, record: Mapping[str, Any]) -> None:
        """The numbers of a record of `metrics.jsonl`."""
        self._log("metrics", record["iteration"], figures_of(record))

    def log_evaluation(self, iteration: int, name: str, figures: Mapping[str, float]) -> None:
        """The figures of a complete evaluation on the set of that name."""
        named = {f"{EVALUATION}{name}/{key}": value for key, value in figures.items() if math.isfinite(value)}
        self._log(f"evaluation of {name}", iteration, named)

    def log_samples(self, iteration: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """Rows of `samples.jsonl`."""
        rows = list(_rows(groups))

        def call(tracker: Tracker) -> None:
            tracker.log_samples(iteration, rows)

        if rows:
            self._put("samples", iteration, call)

    def close(self) -> None:
        """Waits until the trackers have sent everything, for a limited time that they have together."""
        deadlines = [thread.begin_close() for thread in self._threads]
        for thread, deadline_s in zip(self._threads, deadlines, strict=True):
            thread.end(deadline_s)

    def _log(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        def call(tracker: Tracker) -> None:
            tracker.log(step, figures)

        if figures:
            self._put(kind, step, call)

    def _put(self, kind: str, step: int, call: Any) -> None:
        for thread in self._threads:
            thread.put((kind, step, call))


def figures_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record that can be plotted over the iterations."""
    return {
        key: value
        for key, value in record.items()
        if isinstance(value, float | int) and not isinstance(value, bool) and not key.startswith("iteration")
    }


def _rows(groups: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    for group in groups:
        for response in group["responses"]:
            yield {
                "iteration": group["iteration"],
                "index": group["index"],
                "prompt_id": group["prompt_id"],
                "prompt": group.get("prompt"),
                "response": response["text"],
                "reward": response["reward"],
                "num_tokens": response["num_tokens"],
                "finish_reason": response["finish_reason"],
            }
