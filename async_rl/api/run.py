"""A run from Python: started, followed, ended, resumed and looked at; its process is that of `async-rl run`.

What waits here: the loop over a run's records, for the next one, and `wait`, for the end of the run. Both are woken by
the end of its process, and end it when they are interrupted.
"""

import argparse
import atexit
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypedDict

from typing_extensions import Unpack

from async_rl.api.command import POLL_S, Command, open_log
from async_rl.api.evaluation import EvaluationOptions, evaluate, finished, of_run
from async_rl.api.inputs import CONFIG, FOLDER, Inputs
from async_rl.api.page import DashboardLink, Page
from async_rl.api.settings import Sections, parsed, toml_of, tree_of
from async_rl.config.file import load_config, parse_config
from async_rl.config.sections import Config
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.records.records import CONFIG as ALL
from async_rl.records.records import require_no_records
from async_rl.records.run_records import METRICS, RunRecords, has_iteration, object_in, require_readable
from async_rl.shared.files import write_file
from async_rl.shared.locks.lease import holder_of
from async_rl.shared.locks.run_lock import LAUNCHER_LOCK_FILE, lock_run, make_run_dir, require_unlocked
from async_rl.shared.programs.error_text import error_text
from async_rl.shared.programs.parts import load_part

LOG = "logs/run.log"
"""Of the launcher, locked from before anything is written to a run's folder until the launcher has ended."""

RESUME = "--run.resume=true"


class ExportOptions(TypedDict, total=False):
    """Of `async-rl export`."""

    iteration: int
    model: str
    merge: bool


def train(
    model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    data: Any = None,
    reward: Any = None,
    out: str | os.PathLike[str] | None = None,
    *,
    program: Any = None,
    config: Config | None = None,
    quiet: bool = False,
    **settings: Unpack[Sections],
) -> "Run":
    """Starts a run in the folder `out` and returns at once; see docs/python.md.

    Args:
        model: a Hugging Face checkpoint, a folder or a name of the hub; or the keys of [model].
        data: a path or name as `prompts.source`, a list of rows, a data set, or anything iterable with a length.
        reward: a function, a name as `reward.name`, a list of both, which are added up, or the keys of [reward].
        program: an asynchronous function, or a name as `rollout.program`.
        config: settings that those given here replace.
        quiet: does not print the run's progress.
        settings: sections of the config, `train={"iterations": 5}`.

    Raises:
        ConfigError: something of this cannot work, as far as this is known before the processes start.
        RunDirInUse: another run uses the folder.
        WriteFailed: the folder cannot be written to.
    """
    tree = tree_of(config, settings, model=model, data=data, reward=reward, program=program, out=out)
    if isinstance(tree.get("run", {}).get("dir"), str | os.PathLike):
        tree["run"]["dir"] = str(Path(tree["run"]["dir"]).expanduser().absolute())
    inputs = Inputs(Path(str(tree.get("run", {}).get("dir"))) / FOLDER)
    checked = parsed(inputs.take(tree), "async_rl.train")
    return Run(checked.run.dir, quiet=quiet)._begin(checked, inputs)


def open_run(path: str | os.PathLike[str]) -> "Run":
    """A run that was started before, or elsewhere.

    Raises:
        ConfigError: it is not the folder of a run.
    """
    folder = Path(path).expanduser().absolute()
    require_readable(folder, [METRICS])
    if not any((folder / name).exists() for name in (METRICS, "launch.json", FOLDER)):
        raise ConfigError(f"{str(folder)!r} has no records of a run: name the folder of one, which has {METRICS}")
    return Run(folder)


class Run:
    """A run: iterating over it gives the record of each iteration, from the first one on, as they arrive.

    Its methods may be called from any thread. It goes on while the program does other things; at the end of a script it
    is waited for, and where the script ends by an error, or a notebook's kernel ends, it is ended.
    """

    def __init__(self, path: Path, *, quiet: bool = False) -> None:
        self.dir = path
        self._quiet = quiet
        self._command: Command | None = None
        self._dashboard: DashboardLink | None = None
        self._cell: int | None = None

    def __repr__(self) -> str:
        return f"<Run {str(self.dir)!r}: {self.state}, {self._describe_progress()}>"

    @property
    def config(self) -> Config:
        """Its settings: those that were given, or of a run that was not started from Python all, without secrets.

        Raises:
            ConfigError: it has none yet.
        """
        path = self.dir / FOLDER / CONFIG
        return load_config(path) if path.is_file() else parse_config({**object_in(self.dir / ALL)}, str(self.dir / ALL))

    @property
    def is_running(self) -> bool:
        if self._command is None:
            return holder_of(self.dir) is not None
        return self._command.exit_code is None

    @property
    def state(self) -> Literal["running", "finished", "failed", "stopped"]:
        if self.is_running:
            return "running"
        if self.error is not None:
            return "failed"
        done, total = self._progress()
        return "finished" if total is not None and done >= total else "stopped"

    @property
    def error(self) -> AsyncRLError | None:
        """What it ended by, where it was started here; None while it runs, after success, and after `stop`."""
        return None if self._command is None else self._command.failure()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        records, last = RunRecords(self.dir).metrics, -1
        self._note_cell()
        try:
            while True:
                has_ended = not self.is_running
                # A run that resumes trains some iterations again.
                for record in filter(has_iteration, records.new_records()):
                    if record["iteration"] > last:
                        last = record["iteration"]
                        yield record
                if has_ended:
                    break
                self._pause()
        except KeyboardInterrupt:
            self._end_interrupted()
            raise
        if (error := self.error) is not None:
            raise error

    def wait(self, timeout_s: float | None = None) -> "Run":
        """Waits for its end, or for so long.

        Raises:
            AsyncRLError: the error that it ended by, of the class that it has in the trainer.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._note_cell()
        try:
            if self._command is not None:
                self._command.wait(timeout_s)
            while self._command is None and self.is_running and (deadline is None or time.monotonic() < deadline):
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            self._end_interrupted()
            raise
        if (error := self.error) is not None:
            raise error
        return self

    def stop(self) -> None:
        """Ends it after the iteration in training, with a checkpoint, and waits for that; nothing where it has ended.

        Raises:
            ConfigError: it was not started here.
        """
        if self._command is not None:
            self._command.end()
        elif self.is_running:
            raise ConfigError(f"the run in {str(self.dir)!r} was not started here: end it where it was started")

    def resume(
        self, *, reward: Any = None, program: Any = None, quiet: bool | None = None, **settings: Unpack[Sections]
    ) -> "Run":
        """Goes on from its newest checkpoint, with these settings in place of its own; returns itself.

        Raises:
            ConfigError: it was not started from Python, or a setting cannot work.
            RunDirInUse: it is running.
        """
        path = self.dir / FOLDER / CONFIG
        if not path.is_file():
            raise ConfigError(
                f"the run in {str(self.dir)!r} was not started from Python: go on with async-rl run CONFIG {RESUME}"
            )
        tree = tree_of(load_config(path), settings, reward=reward, program=program, out=self.dir)
        inputs = Inputs(self.dir / FOLDER)
        checked = parsed(inputs.take(tree), "Run.resume")
        self._quiet = self._quiet if quiet is None else quiet
        return self._begin(checked, inputs, RESUME)

    @property
    def metrics(self) -> Any:
        """The records of its iterations (docs/metrics.md): a table of pandas, or where that is missing a list."""
        return _table(filter(has_iteration, RunRecords(self.dir).metrics.new_records()))

    @property
    def evaluations(self) -> Any:
        """The records of its evaluations, likewise."""
        return _table(RunRecords(self.dir).evaluations.new_records())

    def samples(
        self,
        number: int = 10,
        *,
        order: Literal["newest", "worst", "best"] = "newest",
        iteration: int | None = None,
        grep: str | None = None,
    ) -> Any:
        """Prompts, responses and rewards: a table of pandas, or where that is missing a list; as `async-rl samples`.

        Raises:
            ConfigError: an option is invalid, or the run has no records yet.
        """
        orders = {"newest": None, "worst": None, "best": None}
        if order not in orders:
            raise ConfigError(f"order is {order!r}: expected {', '.join(orders)}")
        options = argparse.Namespace(**orders | {order: number}, run=self.dir, iteration=iteration, grep=grep)
        return _table(map(asdict, load_part("dashboard", "sample_list").wanted_samples(options)))

    def plot(self) -> Page:
        """Its curves, periods, samples and proofs so far, as a notebook shows them below a cell, or for a file.

        Raises:
            ConfigError: it has no records yet.
        """
        runs = [load_part("dashboard", "run_data").open_run(self.dir)]
        return Page(load_part("dashboard", "report").report(runs))

    def dashboard(self) -> DashboardLink:
        """A live page on this machine, which is served until this program ends.

        Raises:
            ConfigError: it has no records yet.
        """
        if self._dashboard is None or not self._dashboard.is_served:
            self._dashboard = DashboardLink(self._helper("dashboard", [str(self.dir), "--port", "0"], shows=False))
        return self._dashboard

    def evaluate(self, data: Any, reward: Any = None, **options: Unpack[EvaluationOptions]) -> dict[str, Any]:
        """Scores its newest checkpoint on other rows, by its own reward unless another one is given: see `evaluate`."""
        own = of_run(self.config, reward)
        settings = {**own["settings"], **(options.get("settings") or {})}
        chosen: EvaluationOptions = {**own, **options, "settings": settings}
        return evaluate(self.dir, data, reward, **chosen)

    def export(self, to: str | os.PathLike[str], **options: Unpack[ExportOptions]) -> Path:
        """Writes its newest checkpoint, or `iteration`, as a Hugging Face checkpoint: see `async-rl export`.

        Raises:
            ConfigError: there is no checkpoint, or the folder is not empty.
            WriteFailed: it cannot be written.
        """
        words = [str(self.dir), "--to", str(to), *(["--merge"] if options.get("merge") else [])]
        words += [f"--{key}={value}" for key, value in options.items() if key != "merge" and value is not None]
        finished(self._helper("export", words, shows=not self._quiet))
        return Path(to)

    def _begin(self, config: Config, inputs: Inputs, *words: str) -> "Run":
        """Writes what it gets, and starts it."""
        make_run_dir(self.dir / "logs")
        with lock_run(self.dir, LOG) as log:
            # Of others, which `async-rl run` and the trainer hold.
            lock_run(self.dir, LAUNCHER_LOCK_FILE).close()
            require_unlocked(self.dir)
            if RESUME not in words:
                require_no_records(config.run)
            inputs.write(config)
            write_file(inputs.folder / CONFIG, toml_of(config))
            command = [str(inputs.folder / CONFIG), *words]
            is_first = self._command is None
            grace_s = config.checkpoint.grace_s
            self._command = Command("run", command, log, grace_s=grace_s, shows=not self._quiet)
        try:
            self._note_cell()
            if is_first:
                _end_with_cells(self)
                atexit.register(self._at_exit, os.getpid())
        except BaseException:
            self._end_interrupted()
            raise
        return self

    def _helper(self, name: str, words: Sequence[str], *, shows: bool) -> Command:
        with open_log(self.dir / "logs" / f"{name}.log") as log:
            return Command(name, words, log, grace_s=0.0, shows=shows)

    def _pause(self) -> None:
        if self._command is None:
            time.sleep(POLL_S)
        else:
            self._command.wait(POLL_S)

    def _end_interrupted(self) -> None:
        if self._command is not None:
            self._command.end()

    def _progress(self) -> tuple[int, int | None]:
        """Iterations that are trained, and of how many."""
        newest = next(filter(has_iteration, RunRecords(self.dir).metrics.newest_first()), None)
        return (0, None) if newest is None else (newest["iteration"] + 1, newest.get("iterations"))

    def _describe_progress(self) -> str:
        done, total = self._progress()
        return f"{done} iterations" if total is None else f"{done} of {total} iterations"

    def _at_exit(self, pid: int) -> None:
        """At the end of a script waits for it; where that ends by an error, and in a notebook, ends it."""
        if os.getpid() != pid or self._command is None or self._command.exit_code is not None:
            return
        try:
            if _shell() is None and not hasattr(sys, "ps1") and getattr(sys, "last_value", None) is None:
                self.wait()
            else:
                self.stop()
        except AsyncRLError as error:
            print(f"{type(error).__name__}: {error_text(error)}", file=sys.stderr)
            sys.stderr = _Unflushable(sys.stderr)

    def _note_cell(self) -> None:
        """The cell in which it was started, or waited for: the one whose interruption ends it."""
        shell = _shell()
        self._cell = None if shell is None else shell.execution_count

    def _after_cell(self, result: Any) -> None:
        is_interrupted = isinstance(getattr(result, "error_in_exec", None), KeyboardInterrupt)
        if is_interrupted and self._cell is not None and result.execution_count == self._cell:
            self._end_interrupted()


class _Unflushable:
    """In place of sys.stderr at the end of a script: Python exits with 120 where a standard stream cannot be flushed
    after all handlers (see `sys.exit`). `os._exit` would leave out those of others."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        raise OSError("a run of this program has failed")


def _shell() -> Any:
    """IPython's, as in a notebook; None elsewhere."""
    found = sys.modules.get("IPython")
    return None if found is None else found.get_ipython()


def _end_with_cells(run: Run) -> None:
    """Ctrl-C while the body of a loop over the run computes, and not the run's own code, ends the run, too."""
    if (shell := _shell()) is not None:
        shell.events.register("post_run_cell", run._after_cell)


def _table(rows: Iterator[Any]) -> Any:
    found = list(rows)
    return import_module("pandas").DataFrame(found) if find_spec("pandas") is not None else found
