"""The tasks of a run as Slurm's queue has them now; for `async-rl status`."""

import shutil
from collections.abc import Iterable
from dataclasses import replace

from deploy.cluster.supervised_process import ENDED
from deploy.cluster.tasks import Task
from deploy.slurm.commands import QueuedJob, own_jobs


def with_queue(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """The tasks with the states and hosts of their jobs; unchanged where there is no Slurm.

    Raises:
        SlurmFailed: the controller does not answer.
    """
    if shutil.which("squeue") is None:
        return tuple(tasks)
    jobs = {job.id: job for job in own_jobs()}
    return tuple(now(task, jobs.get(task.id or "")) for task in tasks)


def now(task: Task, job: QueuedJob | None) -> Task:
    """The task with the state and host of its job; None where Slurm does not know it any more."""
    if job is None:
        # A task that ended by itself has said how; another one was ended with its job.
        return task if task.state in ENDED else replace(task, state="over")
    if job.state == "running":
        # The task itself knows more: whether its command runs, or is about to be started again.
        return replace(task, host=job.host, state="starting" if task.state == "submitted" else task.state)
    return replace(task, host=job.host, state=f"{job.state} ({job.reason})")
