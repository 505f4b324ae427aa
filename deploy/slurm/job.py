"""The job of a task, as Slurm describes it to its batch process, and the training job as an instance's task sees it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from deploy.slurm.commands import SlurmFailed, own_jobs

CHECK_S: Final = 30.0
"""Between two looks of an instance's task at the queue: all tasks of an array ask the same controller."""


@dataclass(frozen=True, slots=True)
class Job:
    """
    Attributes:
        num_requeues: how often Slurm has started the job again.
        array: the id of its array; None for a job that is in none.
    """

    id: str
    num_requeues: int
    num_nodes: int
    array: str | None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Job":
        return cls(
            id=environment["SLURM_JOB_ID"],
            num_requeues=int(environment.get("SLURM_RESTART_COUNT", "0")),
            num_nodes=int(environment.get("SLURM_JOB_NUM_NODES", "1")),
            array=environment.get("SLURM_ARRAY_JOB_ID"),
        )


class TrainingJob:
    """Whether the training job of a run is over, from Slurm's queue; the first look is at once."""

    def __init__(self, job: str) -> None:
        self.id = job
        self._next_look_s = 0.0

    def is_over(self) -> bool:
        """True where the queue has no such job any more; one that waits there, as after a requeue, is not over."""
        if time.monotonic() < self._next_look_s:
            return False
        try:
            return all(job.id != self.id for job in own_jobs())
        except SlurmFailed:
            # A controller that does not answer says nothing.
            return False
        finally:
            self._next_look_s = time.monotonic() + CHECK_S
