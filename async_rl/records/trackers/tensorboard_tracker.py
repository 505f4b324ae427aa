"""TensorBoard: event files in `run.dir/tensorboard`, those of evaluations in a directory of their own."""

from collections.abc import Sequence

from async_rl.records.tensorboard import ScalarFile
from async_rl.records.trackers.tracker import EVALUATION, Figures, Row, TrackedRun


class TensorBoardTracker:
    """TensorBoard follows one file of a directory at a time, and so evaluations have another one."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self._figures = ScalarFile(run.run_dir / "tensorboard", run.first_step)
        self._evaluations: ScalarFile | None = None

    def log(self, step: int, figures: Figures) -> None:
        is_evaluation = any(name.startswith(EVALUATION) for name in figures)
        (self._of_evaluations() if is_evaluation else self._figures).write(step, figures)

    def log_samples(self, step: int, rows: Sequence[Row]) -> None:
        """It has no tables."""

    def close(self) -> None:
        self._figures.close()
        if self._evaluations is not None:
            self._evaluations.close()

    def _of_evaluations(self) -> ScalarFile:
        if self._evaluations is None:
            self._evaluations = ScalarFile(self._run.run_dir / "tensorboard" / "evaluation", self._run.first_step)
        return self._evaluations


def make_tracker(run: TrackedRun) -> TensorBoardTracker:
    return TensorBoardTracker(run)
