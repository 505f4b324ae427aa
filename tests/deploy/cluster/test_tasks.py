from pathlib import Path

import pytest

from async_rl.errors import ConfigError
from deploy.cluster.tasks import Task, read_launch, remove_tasks, write_launch, write_task

TRAINER = Task("trainer", "trainer", host="a", id="17", state="running", log="logs/trainer.log")
INSTANCE = Task("instance-0", "instance", id="18_0")


def test_the_tasks_of_a_launch_are_read_as_written(tmp_path: Path) -> None:
    write_launch(tmp_path / "run", "slurm", [TRAINER, INSTANCE])
    launch = read_launch(tmp_path / "run")
    assert launch.engine == "slurm" and launch.tasks == (TRAINER, INSTANCE)


def test_what_a_task_writes_of_itself_is_newer_but_its_id_is_the_launchers(tmp_path: Path) -> None:
    write_launch(tmp_path, "slurm", [TRAINER, INSTANCE])
    write_task(tmp_path, Task("instance-0", "instance", host="b", state="waiting", restarts=2, cause="it died"))
    (_, instance) = read_launch(tmp_path).tasks
    assert instance == Task("instance-0", "instance", host="b", id="18_0", state="waiting", restarts=2, cause="it died")
    remove_tasks(tmp_path)
    assert read_launch(tmp_path).tasks == (TRAINER, INSTANCE)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no launcher has started a run"), ("[]", "is not the record of a launcher")]
)
def test_a_directory_without_a_launch_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "launch.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_launch(tmp_path)
