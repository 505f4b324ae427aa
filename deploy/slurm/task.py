"""Keeps one task of a Slurm run going: `python -m deploy.slurm.task OPTIONS -- COMMAND`, as the job's batch process.

A command that died is started again in the same job; after the loss of a node Slurm starts the whole job again. Both
count against `cluster.max_restarts`. The last restart of a job of several nodes requeues it: a node may hang that Slurm
has not found out about yet.

The trainer's task ends the array of instances when the run is over; so does an instance's task that no longer finds the
training job in the queue.

| signal | from | consequence |
|---|---|---|
| SIGUSR1 | Slurm, before the time limit (`--signal=B:USR1`) | the task saves and ends, and the job is requeued |
| SIGINT | a user (`scancel --batch --signal=INT JOB`) | the task saves and ends, with as much time as it needs |
| SIGTERM | Slurm: `scancel`, requeue, preemption | Slurm has sent it to all processes of the job: wait for their end |

Exit codes: 0 done, 1 failed, 2 bad input, 130 and 143 ended by SIGINT and SIGTERM.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final

from async_rl.errors import AsyncRLError, ConfigError, ProcessFailed, RestartsExhausted
from async_rl.shared.files import write_file
from async_rl.shared.programs.command_line import Parser
from deploy.cluster.fleet import num_trained_with
from deploy.cluster.process import Process, Running, log_path, start_process
from deploy.cluster.restarts import Restarts, num_trained
from deploy.cluster.stopping import explain_end
from deploy.cluster.supervised_process import ENDED, SupervisedProcess
from deploy.cluster.tasks import Task, read_launch, write_task
from deploy.slurm.commands import SlurmFailed, cancel, end_steps, own_jobs, requeue
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
        restarts.resume(known, num_trained)
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
        content = {"job": self._job, "num_requeues": self._num_requeues, "settled": settled, **restarts.counts()}
        write_file(self._file, json.dumps(content) + "\n")


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


POLL_S: Final = 0.5
STOPPED: Final = 128 + signal.SIGTERM
INTERRUPTED: Final = 128 + signal.SIGINT
REQUEUE_S: Final = 120.0
"""For Slurm to kill a job that it has accepted to requeue."""

TRAINER: Final = "trainer"


class Signals:
    """Which signals this process has received."""

    def __init__(self) -> None:
        self._received: set[int] = set()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._note)

    def __contains__(self, number: int) -> bool:
        return number in self._received

    def __bool__(self) -> bool:
        return bool(self._received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received.add(number)


class SlurmTask:
    """One task: its process, its restarts, and its record for `async-rl status`.

    Args:
        process: the command, and the task's name, role and grace time.
        run_dir: shared by all hosts.
        training: whose end is that of an instance; None for the trainer.
        token: of the fleet endpoint.
    """

    def __init__(
        self,
        process: Process,
        run_dir: Path,
        restarts: Restarts,
        job: Job,
        training: TrainingJob | None,
        token: str | None,
    ) -> None:
        self._run_dir, self._job, self._training = run_dir, job, training
        self._signals = Signals()
        self._restarts = restarts
        self._memory = Memory(run_dir, process.name, job.id, job.num_requeues)
        self._reports = folder_of(run_dir) / "failures"
        self._reports.mkdir(parents=True, exist_ok=True)
        self._written: Task | None = None
        self._killed_s: float | None = None
        self._may_move = job.num_nodes > 1
        is_trainer = process.role == TRAINER
        trained = (
            partial(num_trained, run_dir) if is_trainer else partial(num_trained_with, run_dir, process.name, token)
        )
        self._memory.recall(restarts, trained())
        self._memory.keep(restarts, settled=False)
        self._supervised = SupervisedProcess(self._start(process), self._start, restarts, trained)

    def run(self) -> int:
        """Returns the exit code when the task is over; does not return from a requeue.

        Raises:
            ProcessFailed, RestartsExhausted: the task failed for good.
        """
        while self._supervised.state not in ENDED and not (self._signals and self._supervised.state == "waiting"):
            if event := self._supervised.check():
                self._say(event)
                # The loss of a node ends srun as well, shortly before the job: one loss.
                self._memory.keep(self._restarts, settled=self._supervised.state == "waiting")
            if self._signals:
                self._end()
            elif self._training is not None and self._training.is_over():
                self._end_array(self._training)
            elif self._is_last_restart() and self._moved():
                return STOPPED
            self._record()
            time.sleep(POLL_S)
        self._record()
        # An instance exits with 0 also when it was asked to end.
        if self._supervised.state == "done" and (self._supervised.process.role == TRAINER or not self._signals):
            return 0
        if signal.SIGTERM in self._signals:
            return STOPPED
        if self._supervised.failure is not None and not self._was_asked_to_end():
            raise self._supervised.failure
        if signal.SIGUSR1 in self._signals:
            self._requeue("the time limit is near: the job goes back into the queue")
            return STOPPED
        return INTERRUPTED

    def _was_asked_to_end(self) -> bool:
        """Whether this task's own request to end explains its end."""
        failure = self._supervised.failure
        return bool(self._signals) and isinstance(failure, ProcessFailed) and failure.cause in (None, "RunStopped")

    def _start(self, process: Process) -> Running:
        report = self._reports / f"{process.name}-{self._job.id}-{time.time_ns()}"
        return start_process(process, report)

    def _end(self) -> None:
        """Lets the process end: it is asked once, and killed when its grace time has passed."""
        if self._killed_s is None:
            self._supervised.restart_no_more()
            self._killed_s = time.monotonic() + self._supervised.process.grace_s
            if signal.SIGTERM in self._signals:
                return
            self._say("told to end: saving, and ending")
            if self._supervised.process.role == TRAINER:
                # srun would take SIGTERM for an order to end its step within Slurm's KillWait.
                end_steps(self._job.id)
            else:
                self._supervised.running.request_end()
        elif time.monotonic() > self._killed_s:
            self._supervised.running.request_end()

    def _end_array(self, training: TrainingJob) -> None:
        """Slurm then ends this task as well."""
        self._say(f"the training job {training.id} is no longer in the queue: ending all instances")
        with suppress(SlurmFailed):
            # Tried again after the next look at the queue.
            cancel(self._job.array or self._job.id)

    def _is_last_restart(self) -> bool:
        return self._supervised.state == "waiting" and self._restarts.without_progress == self._restarts.limit

    def _moved(self) -> bool:
        """Whether the job is started again on nodes that Slurm selects anew: one of several may hang."""
        if not self._may_move:
            return False
        try:
            self._requeue("the last restart: the job goes back into the queue, and gets other nodes if one hangs")
        except SlurmFailed as error:
            self._may_move = False
            self._say(f"started again in this job, as it cannot be requeued: {error}")
        return self._may_move

    def _requeue(self, why: str) -> None:
        """Puts the job back into the queue, where it starts again from the checkpoint; Slurm then kills this process.

        Raises:
            SlurmFailed: it was not requeued.
        """
        self._say(why)
        self._memory.keep(self._restarts, settled=True)
        requeue(self._job.id)
        deadline_s = time.monotonic() + REQUEUE_S
        while signal.SIGTERM not in self._signals and time.monotonic() < deadline_s:
            time.sleep(POLL_S)

    def _record(self) -> None:
        kept = self._supervised
        task = Task(
            name=kept.process.name,
            role=kept.process.role,
            host=socket.gethostname(),
            id=None,
            state=kept.state,
            restarts=self._restarts.total,
            log=str(kept.process.log_file),
            cause=kept.cause,
        )
        if task != self._written:
            self._written = task
            write_task(self._run_dir, task)

    def _say(self, text: str) -> None:
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self._supervised.process.name}: {text}", flush=True)


def end_instances(run_dir: Path) -> None:
    """Ends the array of instances of a run that is over, which otherwise end when their patience does."""
    try:
        arrays = {(task.id or "").partition("_")[0] for task in read_launch(run_dir).tasks if task.role == "instance"}
        for array in arrays - {""}:
            cancel(array)
    except (ConfigError, SlurmFailed) as error:
        print(f"the instances still run, until no trainer has answered for half an hour: {error}", flush=True)


def make_parser() -> Parser:
    parser = Parser(
        "deploy.slurm.task", "Keeps one task of a Slurm run going.", "--name NAME --run-dir DIR [OPTIONS] -- COMMAND"
    )
    parser.keep_rest()
    parser.add_argument("--name", required=True, help="of the task, and of its log")
    parser.add_argument("--role", choices=[TRAINER, "instance"], required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--grace-s", type=float, required=True, help="from the request to end until it is killed")
    parser.add_argument("--stopped-after-s", type=float, help="a process stopped by a signal for so long is killed")
    parser.add_argument("--max-restarts", type=int, required=True)
    parser.add_argument("--training-job", help="of an instance: it ends when this job is no longer in the queue")
    return parser


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    run_dir = options.run_dir
    log = log_path(run_dir, options.name)
    grace_s, limit_s = options.grace_s, options.stopped_after_s
    process = Process(options.name, options.role, parser.rest, log, grace_s=grace_s, stopped_after_s=limit_s)
    restarts = Restarts(options.max_restarts)
    training = TrainingJob(options.training_job) if options.training_job else None
    token = os.environ.get("ASYNC_RL_TOKEN")
    is_over = options.role == TRAINER
    try:
        code = SlurmTask(process, run_dir, restarts, Job.of(os.environ), training, token).run()
        # Slurm itself ends or requeues the job; a user who ended it ends the array, too.
        is_over &= code != STOPPED
    except AsyncRLError as error:
        code = explain_end(error)
        # Another trainer has taken over the run, and the instances with it.
        is_over &= not (isinstance(error, ProcessFailed) and error.cause == "Fenced")
    if is_over:
        end_instances(run_dir)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
