"""What `async-rl launch slurm` leaves behind, with stand-ins for Slurm's commands in PATH."""

import json
import os
import stat
from pathlib import Path

import pytest

from async_rl.errors import RunDirInUse
from deploy.cluster.plan import ClusterPlan, plan_cluster
from deploy.slurm.__main__ import launch
from deploy.slurm.commands import SlurmFailed
from tests.support.minimal_config import config_of

pytestmark = pytest.mark.distributed

SBATCH = """#!/bin/sh
echo "sbatch $*" >> "{said}"
case "$*" in *instances*) {instances} ;; *) {training} ;; esac
"""


@pytest.fixture
def plan(tmp_path: Path) -> ClusterPlan:
    return plan_cluster(Path("run.toml"), config_of(run={"dir": str(tmp_path / "a run")}), ())


class Ground:
    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._bin, self._said = path / "bin", path / "said"
        self._bin.mkdir()
        self._said.touch()
        monkeypatch.setenv("PATH", str(self._bin), prepend=":")
        self._command("scancel", f'#!/bin/sh\necho "scancel $*" >> "{self._said}"\n')
        self.queue("")
        self.submits("echo 17", "echo '18;cluster'")

    def submits(self, training: str, instances: str) -> None:
        self._command("sbatch", SBATCH.format(said=self._said, training=training, instances=instances))

    def queue(self, lines: str) -> None:
        self._command("squeue", f"#!/bin/sh\nprintf '{lines}'\n")

    def said(self) -> list[str]:
        return self._said.read_text().splitlines()

    def _command(self, name: str, text: str) -> None:
        (self._bin / name).write_text(text)
        (self._bin / name).chmod(0o755)


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    return Ground(tmp_path, monkeypatch)


def test_both_jobs_are_submitted_and_recorded(ground: Ground, plan: ClusterPlan) -> None:
    assert launch(plan, None) == ("17", "18")
    folder = plan.config.run.dir / "slurm"
    assert ground.said() == [
        f"sbatch --parsable {folder}/training.sbatch",
        f"sbatch --parsable --dependency=after:17 {folder}/instances.sbatch 17",
    ]
    tasks = json.loads((plan.config.run.dir / "launch.json").read_text())["tasks"]
    assert [(task["name"], task["id"]) for task in tasks] == [("trainer", "17"), ("instance-0", "18_0")]


def test_what_the_jobs_run_can_only_be_changed_by_their_user(ground: Ground, plan: ClusterPlan) -> None:
    before = os.umask(0)
    try:
        launch(plan, None)
    finally:
        os.umask(before)
    assert stat.S_IMODE((plan.config.run.dir / "slurm").stat().st_mode) == 0o700


def test_a_training_job_whose_instances_are_refused_is_taken_back(ground: Ground, plan: ClusterPlan) -> None:
    ground.submits("echo 17", "echo 'error: Invalid job array specification' >&2; exit 1")
    with pytest.raises(SlurmFailed, match="Invalid job array specification"):
        launch(plan, None)
    assert ground.said()[-1] == "scancel 17"
    assert not (plan.config.run.dir / "launch.json").exists()


def test_an_option_that_keeps_sbatch_from_submitting_is_noticed(ground: Ground, plan: ClusterPlan) -> None:
    ground.submits("true", "echo 18")
    with pytest.raises(SlurmFailed, match="submitted no job"):
        launch(plan, None)


@pytest.mark.parametrize("queued", ["17|PENDING||Resources", "17|COMPLETING|n1|None", "18_0|RUNNING|n2|None"])
def test_a_run_whose_jobs_are_in_the_queue_is_not_launched_again(
    ground: Ground, plan: ClusterPlan, queued: str
) -> None:
    launch(plan, None)
    ground.queue(queued + "\\n")
    before = {file: file.read_bytes() for file in plan.config.run.dir.rglob("*") if file.is_file()}
    with pytest.raises(RunDirInUse, match=f"queue: {queued[:2]}; wait for their end, or `scancel {queued[:2]}`"):
        launch(plan, "another token")
    assert {file: file.read_bytes() for file in plan.config.run.dir.rglob("*") if file.is_file()} == before
    ground.queue("99|RUNNING|n1|None\\n")
    launch(plan, None)
