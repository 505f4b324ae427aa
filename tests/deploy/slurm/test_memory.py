from pathlib import Path

import pytest

from async_rl.errors import RestartsExhausted
from deploy.cluster.restarts import Restarts
from deploy.slurm.files import folder_of
from deploy.slurm.task import Memory


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder_of(tmp_path).mkdir()
    return tmp_path


def start(run_dir: Path, num_requeues: int, trained: int, job: str = "7") -> Restarts:
    """A start of the job, which then remembers."""
    restarts = Restarts(limit=2)
    memory = Memory(run_dir, "trainer", job, num_requeues)
    memory.recall(restarts, trained)
    memory.keep(restarts, settled=False)
    return restarts


def test_a_job_that_is_lost_again_and_again_without_progress_is_started_no_more(run_dir: Path) -> None:
    assert [start(run_dir, n, trained=5).without_progress for n in (0, 1, 2)] == [0, 1, 2]
    with pytest.raises(RestartsExhausted, match=r"job 7 of trainer again 3 times.*cluster\.max_restarts = 2"):
        start(run_dir, 3, trained=5)


def test_progress_and_restarts_in_the_job_itself_count_as_well(run_dir: Path) -> None:
    restarts = start(run_dir, 0, trained=5)
    assert restarts.next_delay_s() == 1.0
    Memory(run_dir, "trainer", "7", 0).keep(restarts, settled=False)
    assert start(run_dir, 1, trained=0).without_progress == 2
    assert start(run_dir, 2, trained=9).without_progress == 1
    assert start(run_dir, 3, trained=9).total == 4


def test_a_loss_that_the_task_has_counted_or_a_start_that_it_asked_for_is_no_further_loss(run_dir: Path) -> None:
    restarts = start(run_dir, 0, trained=5)
    for n in range(1, 6):
        Memory(run_dir, "trainer", "7", n - 1).keep(restarts, settled=True)
        restarts = start(run_dir, n, trained=5)
    assert restarts.total == 0


def test_another_job_begins_anew(run_dir: Path) -> None:
    for n in range(3):
        start(run_dir, n, trained=5)
    assert start(run_dir, 1, trained=5, job="8").total == 0
