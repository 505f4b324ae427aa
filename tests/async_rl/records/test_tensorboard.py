"""Event files of runs that are interrupted and go on, read back as TensorBoard reads them."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from async_rl.errors import WriteFailed
from async_rl.records.trackers.tensorboard_tracker import ScalarFile
from tests.support import ROOT
from tests.support.full_disk import largest_file


def write(directory: Path, first_step: int, *values: float) -> None:
    # Files are read in the order of their names, which have the second in front.
    time.sleep(1.0)
    file = ScalarFile(directory, first_step)
    for step, value in enumerate(values, start=first_step):
        file.write(step, {"loss": value, "reward": -value})
    file.close()


def scalars(directory: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in EventAccumulator(str(directory)).Reload().Scalars(name)]


def test_steps_from_the_restart_on_are_forgotten_and_written_again(tmp_path: Path) -> None:
    write(tmp_path, 0, 0.0, 1.0, 2.0, 3.0)
    write(tmp_path, 2, 20.0, 30.0, 40.0)
    write(tmp_path, 4, 400.0)
    assert scalars(tmp_path, "loss") == [(0, 0.0), (1, 1.0), (2, 20.0), (3, 30.0), (4, 400.0)]
    assert scalars(tmp_path, "reward")[2:4] == [(2, -20.0), (3, -30.0)]


def test_they_are_forgotten_even_if_nothing_follows(tmp_path: Path) -> None:
    write(tmp_path, 0, 0.0, 1.0, 2.0)
    write(tmp_path, 1)
    assert scalars(tmp_path, "loss") == [(0, 0.0)]


@pytest.mark.distributed
def test_the_recorders_can_be_imported_without_torch() -> None:
    """Programs that read records, or have no figures to write, need not have it."""
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['tensorboard'] = None\n"
        "import async_rl.records.recorder, async_rl.evaluation.recorder"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_directory_that_cannot_be_made_is_a_named_error(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").touch()
    with pytest.raises(WriteFailed, match="tensorboard"):
        ScalarFile(tmp_path / "tensorboard", 0)


# Of the writer's own thread, which the next call reports.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_a_named_error(tmp_path: Path) -> None:
    file = ScalarFile(tmp_path, 0)
    with largest_file(100), pytest.raises(WriteFailed):
        for step in range(1000):
            file.write(step, {"loss": 1.0, "reward": 2.0})
        file.close()
