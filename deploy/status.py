"""`async-rl status [--run RUN_DIR]`: what a run's tasks do, wherever its launcher has started them, and how far it is.

Exit codes: 0 success, 2 no run there.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from async_rl.errors import AsyncRLError, ConfigError
from async_rl.records.run_records import RunRecords
from async_rl.shared.locks.lease import Term, read_term
from async_rl.shared.locks.process_identity import has_died
from async_rl.shared.programs.command_line import USAGE_ERROR, Parser
from async_rl.shared.programs.error_text import error_text
from async_rl.shared.programs.parts import has_part, load_part
from async_rl.shared.protocol.fleet import FleetInfo
from deploy.cluster.fleet import read_fleet
from deploy.cluster.restarts import num_trained
from deploy.cluster.run_view import printable
from deploy.cluster.supervised_process import ENDED
from deploy.cluster.tasks import LAUNCH_FILE, LEFT, Launch, Task, read_launch

PIPE_WIDTH = 240
"""Columns of the tables if the output is not a terminal."""


@dataclass(frozen=True, slots=True)
class Status:
    """A run now.

    Attributes:
        num_trained: proven iterations.
        num_iterations: of the whole run; None before the first one.
        trained_s: when the last iteration ended, in Unix time; None before the first one.
        lease: of the trainer that holds the run's directory, or held it last.
        fleet: None while no trainer answers.
    """

    run_dir: str
    engine: str
    num_trained: int
    num_iterations: int | None
    trained_s: float | None
    tasks: tuple[Task, ...]
    lease: Term | None
    fleet: FleetInfo | None

    def as_json(self) -> str:
        fleet = self.fleet.model_dump() if self.fleet else None
        return json.dumps({**asdict(replace(self, fleet=None)), "fleet": fleet}, indent=2)


def read_status(run_dir: Path, token: str | None) -> Status:
    """
    Raises:
        ConfigError: no launcher has started a run there.
    """
    launch = read_launch(run_dir)
    metrics = RunRecords(run_dir).metrics
    last = next((record for record in metrics.newest_first() if "iterations" in record), {})
    return Status(
        run_dir=str(run_dir),
        engine=launch.engine,
        num_trained=num_trained(run_dir),
        num_iterations=last.get("iterations"),
        trained_s=metrics.path.stat().st_mtime if last else None,
        tasks=_tasks_now(launch),
        lease=read_term(run_dir),
        fleet=read_fleet(run_dir, token or _token_of(launch, run_dir)),
    )


def _tasks_now(launch: Launch) -> tuple[Task, ...]:
    if launch.launcher is not None and has_died(launch.launcher):
        # Its processes have ended with it, however it ended: see `async_rl.shared.programs.process_guard`.
        return tuple(task if task.state in ENDED else replace(task, state=LEFT) for task in launch.tasks)
    if launch.engine != "slurm":
        return launch.tasks
    try:
        tasks: tuple[Task, ...] = load_part("slurm", "queue").with_queue(launch.tasks)
        return tasks
    except AsyncRLError as error:
        print(f"async-rl status: Slurm does not tell the states of its jobs: {error}", file=sys.stderr)
        return launch.tasks


def _token_of(launch: Launch, run_dir: Path) -> str | None:
    """The one that the run's launcher has left for this user."""
    if launch.engine != "slurm" or not has_part("slurm"):
        return None
    token: str | None = load_part("slurm", "files").read_token(run_dir)
    return token


def find_run() -> Path:
    """The run that was launched last under ./runs.

    Raises:
        ConfigError: there is none.
    """
    files = sorted(Path().glob(f"runs/*/{LAUNCH_FILE}"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise ConfigError(f"no run was launched under {str(Path('runs').resolve())!r}: name one with --run RUN_DIR")
    return files[-1].parent


def show(status: Status, console: Console) -> None:
    total = "" if status.num_iterations is None else f" of {status.num_iterations}"
    when = "" if status.trained_s is None else f", the last one {time.time() - status.trained_s:.0f} s ago"
    progress = f"{status.run_dir} ({status.engine}): {status.num_trained}{total} iterations{when}"
    console.print(printable(progress), soft_wrap=True)
    if (lease := status.lease) is not None:
        held = "released" if lease.released else "held until its death" if has_died(lease.process) else "held"
        console.print(printable(f"lease: term {lease.term}, {held} by {lease.host}, process {lease.process.pid}"))
    tasks = Table(box=None, pad_edge=False)
    for name in ("task", "host", "id", "state", "restarts", "log"):
        tasks.add_column(name, overflow="fold")
    for task in status.tasks:
        words = (task.name, task.host or "-", task.id or "-", task.state, str(task.restarts), task.log or "-")
        tasks.add_row(*map(printable, words))
    console.print(tasks)
    for task in status.tasks:
        if task.cause:
            console.print(printable(f"{task.name} was lost: {task.cause.splitlines()[0]}"), soft_wrap=True)
    if status.fleet is None:
        console.print(_why_no_trainer_answers(status), highlight=False)
        return
    instances = Table(box=None, pad_edge=False)
    for name in ("instance", "url", "state", "version", "reason"):
        instances.add_column(name, overflow="fold")
    for info in status.fleet.instances:
        row = (info.name, info.url, info.state, info.version or "-", info.reason or "")
        instances.add_row(*map(printable, row))
    console.print(instances)


def _why_no_trainer_answers(status: Status) -> str:
    if status.num_trained == status.num_iterations:
        return "the run is complete"
    if status.lease is not None and status.lease.released:
        return "the trainer has ended before the last iteration: started again with the same run.dir, the run goes on"
    return "no trainer answers: it starts, is started again, or was lost"


def make_parser() -> Parser:
    parser = Parser("async-rl status", "Shows the tasks, the instances and the progress of a run.", "[OPTIONS]")
    parser.add_argument(
        "--run", type=Path, metavar="RUN_DIR", help="run.dir of the run; by default the one launched last in ./runs"
    )
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    return parser


def main(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    try:
        status = read_status(options.run or find_run(), os.environ.get("ASYNC_RL_TOKEN"))
    except AsyncRLError as error:
        print(f"async-rl status: {error_text(error)}", file=sys.stderr)
        return USAGE_ERROR
    if options.json:
        Console().out(status.as_json(), highlight=False)
        return 0
    console = Console()
    show(status, console if console.is_terminal else Console(width=PIPE_WIDTH))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
