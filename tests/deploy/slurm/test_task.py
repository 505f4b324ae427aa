"""A task as the batch process of a job, with a Slurm that only answers: its commands are stand-ins in PATH."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.slurm.files import folder_of

pytestmark = pytest.mark.distributed

STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >> "{said}"
{then}
"""


class Ground:
    """A run's directory, and a Slurm whose `queue` is what `squeue` prints."""

    def __init__(self, path: Path) -> None:
        self.run_dir, self.said, self.queue = path / "run", path / "said", path / "queue"
        self.bin = path / "bin"
        self.bin.mkdir()
        folder_of(self.run_dir).mkdir(parents=True)
        self.said.touch()
        self.queue.touch()
        # What is cancelled or requeued ends, as SIGTERM asks it to.
        self.answers("squeue", f'cat "{self.queue}"')
        self.answers("scancel", "kill -TERM $PPID")
        self.answers("scontrol", "kill -TERM $PPID")

    def answers(self, command: str, then: str) -> None:
        file = self.bin / command
        file.write_text(STAND_IN.format(said=self.said, then=then))
        file.chmod(0o755)

    def start(self, *command: str, role: str = "trainer", options: tuple[str, ...] = (), **environment: str) -> int:
        """Runs a task to its end; returns its exit code."""
        words = [sys.executable, "-m", "deploy.slurm.task", "--name", "task", "--role", role]
        words += ["--run-dir", str(self.run_dir), "--grace-s", "2", "--max-restarts", "2"]
        env = {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **environment}
        done = subprocess.run([*words, *options, "--", *command], env=env, capture_output=True, text=True, timeout=240)
        self.output = done.stdout + done.stderr
        return done.returncode

    def asked(self) -> list[str]:
        """What Slurm was asked since the last call, the queue left out."""
        words = [line for line in self.said.read_text().splitlines() if not line.startswith("squeue")]
        self.said.write_text("")
        return words


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    return Ground(tmp_path)


STOPPED = 128 + signal.SIGTERM


def test_the_last_restart_of_a_job_of_several_nodes_is_on_nodes_that_slurm_selects_anew(ground: Ground) -> None:
    """A node that hangs uses the others up in seconds, long before Slurm gives it up."""
    assert ground.start("false", SLURM_JOB_NUM_NODES="2") == STOPPED
    assert ground.asked() == ["scontrol requeue 7"]
    assert "restart 1)" in ground.output and "restart 2)" not in ground.output
    assert ground.start("false", SLURM_JOB_NUM_NODES="2", SLURM_RESTART_COUNT="1") == 1
    assert "RestartsExhausted" in ground.output and "started again 2 times" in ground.output


def test_a_job_of_one_node_and_one_that_cannot_be_requeued_are_started_again_where_they_are(ground: Ground) -> None:
    assert ground.start("false", SLURM_JOB_NUM_NODES="1") == 1
    assert "scontrol requeue 7" not in ground.asked() and "restart 2)" in ground.output
    ground.answers("scontrol", "echo 'Job requeue disabled' >&2; exit 1")
    assert ground.start("false", SLURM_JOB_NUM_NODES="2", SLURM_JOB_ID="8") == 1
    assert "as it cannot be requeued" in ground.output and "Job requeue disabled" in ground.output
    assert "RestartsExhausted" in ground.output and "restart 2)" in ground.output


def test_an_instance_ends_the_array_when_the_training_job_has_left_the_queue(ground: Ground) -> None:
    ground.queue.write_text("18_0|RUNNING|n1|None\n66|RUNNING|n2|None\n")
    options = ("--training-job", "6")
    assert ground.start("sleep", "60", role="instance", options=options, SLURM_ARRAY_JOB_ID="18") == STOPPED
    assert ground.asked() == ["scancel 18"]
    assert "the training job 6 is no longer in the queue" in ground.output


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUE_HOLD"])
def test_a_training_job_that_is_in_the_queue_keeps_its_instances_whatever_it_does_there(
    ground: Ground, state: str
) -> None:
    ground.queue.write_text(f"6|{state}||None\n")
    assert ground.start("true", role="instance", options=("--training-job", "6"), SLURM_ARRAY_JOB_ID="18") == 0
    assert ground.asked() == []


def test_a_controller_that_does_not_answer_ends_no_instance(ground: Ground) -> None:
    ground.answers("squeue", "exit 1")
    assert ground.start("true", role="instance", options=("--training-job", "6"), SLURM_ARRAY_JOB_ID="18") == 0
    assert ground.asked() == []
