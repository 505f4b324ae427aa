"""TensorBoard: event files in `run.dir/tensorboard`, those of evaluations in a directory of their own."""

import itertools
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rl.records.trackers.tracker import EVALUATION, Figures, Row, TrackedRun
from async_rl.shared.files import named_write_errors

FORMAT = "brain.Event:2"

_numbers = itertools.count()


class ScalarFile:
    """Figures by step in a new event file of `directory`.

    With `first_step`, TensorBoard ignores steps from `first_step` on in the files of an interrupted run.

    Raises:
        WriteFailed: the file cannot be made; of `write` and `close`: it cannot be written.
    """

    def __init__(self, directory: Path, first_step: int) -> None:
        # Imported here: the package can be imported without TensorBoard, and only training writes such a file.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        name = f"events.out.tfevents.{int(time.time()):010}.{platform.node()}.{os.getpid()}.{next(_numbers)}"
        self._path = directory / name
        with named_write_errors(self._path):
            directory.mkdir(parents=True, exist_ok=True)
            self._writer = RecordWriter(self._path.open("wb"))
            self._append(file_version=FORMAT)
            self._append(step=first_step, session_log=SessionLog(status=SessionLog.START))
            self._writer.flush()

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        with named_write_errors(self._path):
            self._append(step=step, summary=self._summary(value=values))
            self._writer.flush()

    def close(self) -> None:
        with named_write_errors(self._path):
            self._writer.close()

    def _append(self, **content: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **content).SerializeToString())


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
