"""Trackio; its own variables (TRACKIO_DIR, TRACKIO_SPACE_ID, ...) say where runs go, by default on this machine."""

from collections.abc import Sequence

import trackio

from async_rl.records.trackers.tracker import SAMPLE_COLUMNS, Figures, Row, TrackedRun


class TrackioTracker:
    def __init__(self, run: TrackedRun) -> None:
        self._run = trackio.init(
            project=run.project,
            # It knows runs by their names only.
            name=f"{run.name}-{run.key}",
            resume="allow",
            config=dict(run.config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, figures: Figures) -> None:
        self._run.log(dict(figures), step=step)

    def log_samples(self, step: int, rows: Sequence[Row]) -> None:
        data = [[row[name] for name in SAMPLE_COLUMNS] for row in rows]
        self._run.log({"samples": trackio.Table(columns=list(SAMPLE_COLUMNS), data=data)}, step=step)

    def close(self) -> None:
        self._run.finish()


def make_tracker(run: TrackedRun) -> TrackioTracker:
    return TrackioTracker(run)
