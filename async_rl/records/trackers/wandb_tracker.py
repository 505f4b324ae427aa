"""Weights & Biases; its own variables (WANDB_MODE, WANDB_API_KEY, WANDB_ENTITY, ...) say where runs go."""

from collections.abc import Sequence

import wandb

from async_rl.records.trackers.tracker import SAMPLE_COLUMNS, Figures, Row, TrackedRun


class WandbTracker:
    def __init__(self, run: TrackedRun) -> None:
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.key,
            resume="allow",
            dir=run.run_dir,
            config=dict(run.config),
            # The trainer's own log stays its own.
            settings=wandb.Settings(console="off"),
        )

    def log(self, step: int, figures: Figures) -> None:
        self._run.log(dict(figures), step=step)

    def log_samples(self, step: int, rows: Sequence[Row]) -> None:
        data = [[row[name] for name in SAMPLE_COLUMNS] for row in rows]
        # Columns may hold None, as a prompt that was not decoded.
        self._run.log({"samples": wandb.Table(list(SAMPLE_COLUMNS), data, allow_mixed_types=True)}, step=step)

    def close(self) -> None:
        self._run.finish()


def make_tracker(run: TrackedRun) -> WandbTracker:
    return WandbTracker(run)
