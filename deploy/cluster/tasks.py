"""The tasks of a run as its launcher started them, for `async-rl status`: `run.dir/launch.json` and `run.dir/tasks/`.

The launcher writes `launch.json`. A task that is kept going by a program of its own, on another host, writes
`tasks/NAME.json`, which is newer than the launcher's record of it; only the id stays the launcher's, if it knew one.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from async_rl.errors import ConfigError
from async_rl.shared.files import write_file
from async_rl.shared.locks.process_identity import ProcessIdentity

LAUNCH_FILE = "launch.json"
TASKS_FOLDER = "tasks"

LEFT: Final = "ended"
"""The state of a task that ended with its launcher, by itself or not."""

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class Task:
    """One task of a run.

    Attributes:
        name: unique in the run; its log is `run.dir/logs/NAME.log`, unless the launcher has another place for it.
        role: "trainer" or "instance".
        host: where it runs; None where that is not known, or not decided.
        id: what its engine knows it by: a process id, or a job's.
        state: in the words of its engine.
        restarts: how often it was started again.
        log: its log file.
        cause: why it was lost the last time.
    """

    name: str
    role: str
    host: str | None = None
    id: str | None = None
    state: str = "submitted"
    restarts: int = 0
    log: str | None = None
    cause: str | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """`engine` is the launcher: local, ray, slurm or kubernetes. `launcher` is its process if they end with it."""

    engine: str
    tasks: tuple[Task, ...]
    launcher: ProcessIdentity | None = None


_LAUNCH: Final = TypeAdapter(Launch)
_TASK: Final = TypeAdapter(Task)


def write_launch(run_dir: Path, engine: str, tasks: Iterable[Task], launcher: ProcessIdentity | None = None) -> None:
    """Replaces the record of a run's tasks, those of an earlier launch included.

    Raises:
        WriteFailed: the old record is unchanged.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    launch = Launch(engine, tuple(tasks), launcher)
    write_file(run_dir / LAUNCH_FILE, json.dumps(asdict(launch), indent=1) + "\n")


def write_task(run_dir: Path, task: Task) -> None:
    """Writes the record of one task, by the program that keeps it going.

    Raises:
        WriteFailed: the old record is unchanged.
    """
    folder = run_dir / TASKS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / f"{task.name}.json", json.dumps(asdict(task), indent=1) + "\n")


def remove_tasks(run_dir: Path) -> None:
    """Removes the records of single tasks, which belong to an earlier launch."""
    for file in (run_dir / TASKS_FOLDER).glob("*.json"):
        file.unlink(missing_ok=True)


def read_launch(run_dir: Path) -> Launch:
    """The tasks of a run, in the order in which its launcher wrote them.

    Raises:
        ConfigError: no launcher has written the record, or it is not one.
    """
    launch = _read(run_dir / LAUNCH_FILE, _LAUNCH)
    if launch is None:
        raise ConfigError(
            f"{str(run_dir / LAUNCH_FILE)!r} does not exist: no launcher has started a run in this directory; name one "
            "with --run"
        )
    return replace(launch, tasks=tuple(_newest(run_dir, task) for task in launch.tasks))


def read_task(run_dir: Path, name: str) -> Task | None:
    """What the program that keeps a task going has written last; None without a record.

    Raises:
        ConfigError: the record is damaged.
    """
    return _read(run_dir / TASKS_FOLDER / f"{name}.json", _TASK)


def _newest(run_dir: Path, task: Task) -> Task:
    newer = read_task(run_dir, task.name)
    return task if newer is None else replace(newer, id=task.id or newer.id)


def _read(file: Path, kind: TypeAdapter[Record]) -> Record | None:
    """None if there is no such file.

    Raises:
        ConfigError: it cannot be read, or is something else.
    """
    try:
        return kind.validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error.strerror}; name a run with --run") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}: " for part in first["loc"])
        raise ConfigError(f"{str(file)!r} is not the record of a launcher: {where}{first['msg']}") from error
