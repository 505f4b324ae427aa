"""What a task of a Slurm run remembers of its restarts when its job is started again, in a file of the run."""

import json
from dataclasses import asdict
from pathlib import Path

from async_rl.errors import RestartsExhausted
from async_rl.shared.files import write_file
from deploy.cluster.restarts import Restarts
from deploy.slurm.files import folder_of


class Memory:
    """Restarts of one task, across the starts of its job.

    Args:
        name: of the task.
        job: the job's id; what another job has written does not count.
        num_requeues: how often Slurm has started this job again.
    """

    def __init__(self, run_dir: Path, name: str, job: str, num_requeues: int) -> None:
        self._file = folder_of(run_dir) / f"{name}.restarts.json"
        self._name, self._job, self._num_requeues = name, job, num_requeues

    def recall(self, restarts: Restarts, num_trained: int) -> None:
        """Takes over the counts of the job's earlier start, and counts its loss unless the task has `settled` it.

        Raises:
            RestartsExhausted: the job was lost too often without progress.
        """
        if not self._file.exists():
            return
        known = json.loads(self._file.read_text())
        if known["job"] != self._job:
            return
        restarts.total, restarts.without_progress = known["total"], known["without_progress"]
        restarts.most_trained = known["most_trained"]
        restarts.note_progress(num_trained)
        was_lost = self._num_requeues > known["num_requeues"] and not known["settled"]
        if was_lost and restarts.next_delay_s() is None:
            raise RestartsExhausted(
                f"Slurm has started job {self._job} of {self._name} again {self._num_requeues} times, the last "
                f"{restarts.limit + 1} without another iteration in between (cluster.max_restarts = {restarts.limit}); "
                f"`sacct --duplicates --jobs={self._job}` has the nodes that were lost"
            )

    def keep(self, restarts: Restarts, *, settled: bool) -> None:
        """Writes the counts; `settled`: the next start of the job, if there is one, is no further loss.

        Raises:
            WriteFailed: the old counts stay.
        """
        counts = {name: value for name, value in asdict(restarts).items() if name not in ("limit", "first_delay_s")}
        content = {"job": self._job, "num_requeues": self._num_requeues, "settled": settled, **counts}
        write_file(self._file, json.dumps(content) + "\n")
