"""Slurm's own commands, as the launcher, its tasks and `async-rl status` use them."""

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from os import environ

from async_rl.errors import AsyncRLError, ConfigError

TIMEOUT_S = 60.0
"""A controller that is busy answers late."""

SECRET = "ASYNC_RL_TOKEN"


class SlurmFailed(AsyncRLError):
    """A command of Slurm failed; the message has its output."""


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job that Slurm knows: `id` with the array's index, `state` in small letters, `host` None while it waits."""

    id: str
    state: str
    host: str | None
    reason: str


def require_slurm() -> None:
    """Raises ConfigError if there is no Slurm on this host."""
    if shutil.which("sbatch") is None:
        raise ConfigError("there is no `sbatch` in PATH: start the run on a login node of the cluster, or load Slurm")


def submit(words: Sequence[str]) -> str:
    """Submits a job script; returns the job's id.

    Raises:
        SlurmFailed: Slurm refuses it, or an option keeps it from being submitted.
    """
    command = ["sbatch", "--parsable", *words]
    # ID, or ID;CLUSTER.
    output = _output(command).strip()
    job = output.partition(";")[0]
    if not job.isdecimal():
        raise SlurmFailed(f"`{shlex.join(command)}` submitted no job; it said {output!r}")
    return job


def cancel(job: str) -> None:
    """Ends a job, or a whole array.

    Raises:
        SlurmFailed: Slurm does not do it.
    """
    _output(["scancel", job])


def end_steps(job: str) -> None:
    """Asks the training nodes of a job to save and end; it reaches their `node.sh`, not the batch process.

    Raises:
        SlurmFailed: Slurm does not do it.
    """
    _output(["scancel", "--signal=URG", job])


def requeue(job: str) -> None:
    """Puts a running job back into the queue; it is killed and starts again from its script.

    Raises:
        SlurmFailed: Slurm does not do it.
    """
    _output(["scontrol", "requeue", job])


def own_jobs() -> list[QueuedJob]:
    """The user's jobs that are not over.

    Raises:
        SlurmFailed: the controller does not answer.
    """
    lines = _output(["squeue", "--noheader", "--array", "--me", "--format=%i|%T|%N|%r"]).splitlines()
    jobs = [line.split("|", 3) for line in lines]
    # While a job waits, the nodes are those that it asks for.
    return [
        QueuedJob(job, state.lower(), host if host and state != "PENDING" else None, reason)
        for job, state, host, reason in jobs
    ]


def _output(words: Sequence[str]) -> str:
    """The output of a command that is started without the run's token: sbatch stores its environment."""
    env = {name: value for name, value in environ.items() if name != SECRET}
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, env=env
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmFailed(f"`{shlex.join(words)}` failed: {error}") from error
    if done.returncode:
        raise SlurmFailed(f"`{shlex.join(words)}` failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout
