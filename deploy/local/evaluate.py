"""Evaluates a model on this machine: `async-rl eval MODEL --data SOURCE (--reward NAME | --program NAME)`, or
`async-rl eval CONFIG.toml`. Of a run, or of adapters, it makes a checkpoint first (`async-rl export`).

Starts instances of the model on this machine, or uses running ones, and samples and scores the data with them, through
the program `async_rl.evaluation`, or with `--harness` through `async_rl.evaluation.harness`. Every process it started
ends with it, however it ends.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from async_rl.checks.preflight import require_sound
from async_rl.checks.preflight.adapter import require_adapters
from async_rl.checks.preflight.model import ModelFiles
from async_rl.checks.preflight.model_room import with_room
from async_rl.config.file import load_config
from async_rl.config.sections import Config
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.records.records import require_no_run
from async_rl.records.run_records import RecordFile
from async_rl.shared.files import temporary_directory, write_file
from async_rl.shared.net.free_ports import free_ports
from async_rl.shared.programs.extras import require_extras
from deploy.cluster.process import Process, Running, log_path
from deploy.cluster.stopping import Stopped, explain_end, report_end, stop_on_signals
from deploy.local import evaluate_options
from deploy.local.machine import this_machine
from deploy.local.plan import num_ports, plan_instances
from deploy.local.processes import Deployment
from deploy.local.run import START_TIMEOUT_S, is_healthy

Line = Mapping[str, Any]
"""A line of the program's `results.jsonl` or `responses.jsonl`; see `async_rl/evaluation/recorder.py`."""

NOT_SHOWN = ("set", "intervals", "sources", "started_unix_s")
"""Keys that are no row of the table: columns, what stands beside another figure, and what only programs read."""


def show_results(console: Console, results: Sequence[Line]) -> None:
    """One column per set and per source of a set, one row per metric, with its confidence interval if it has one."""
    columns = [column for result in results for column in _columns(result)]
    table = Table(title="evaluation, with 95% confidence intervals", title_justify="left")
    table.add_column("")
    for name, _ in columns:
        table.add_column(escape(name), justify="right")
    keys = dict.fromkeys(key for _, line in columns for key in line if key not in NOT_SHOWN)
    for key in keys:
        table.add_row(escape(key), *(_cell(line, key) for _, line in columns))
    console.print(table)


def _columns(result: Line) -> Iterator[tuple[str, Line]]:
    yield result["set"], result
    for name, source in result.get("sources", {}).items():
        yield f"{result['set']}: {name or 'other'}", source


def _cell(line: Line, key: str) -> str:
    value = line.get(key, "")
    shown = f"{value:.4g}" if isinstance(value, float) else str(value)
    if interval := line.get("intervals", {}).get(key):
        shown += " [{:.3g}, {:.3g}]".format(*interval)
    return escape(shown)


def show_harness(console: Console, found: Any) -> None:
    """One row per metric of a task or a group."""
    table = Table(title="lm-eval", title_justify="left")
    for name in ("task", "examples", "rows", "filter", "metric"):
        table.add_column(name, overflow="fold")
    for name in ("value", "standard error"):
        table.add_column(name, justify="right")
    for task, line in found["results"].items():
        about = (task, found["n-shot"].get(task, ""), found["n-samples"].get(task, {}).get("effective", ""))
        for key, value in line.items():
            metric, _, kept = key.partition(",")
            if kept and not metric.endswith("_stderr"):
                figures = (value, line.get(f"{metric}_stderr,{kept}", ""))
                shown = (f"{figure:.4g}" if isinstance(figure, float) else str(figure) for figure in figures)
                table.add_row(*(escape(str(cell)) for cell in (*about, kept, metric, *shown)))
    console.print(table)


def results_json(model: str, results: Sequence[Line]) -> str:
    """The results as one JSON object, on one line."""
    return json.dumps({"model": model, "sets": list(results)})


def require_writable(path: Path) -> None:
    """Checks, before an evaluation that may take hours, that its results can be written.

    Raises:
        ConfigError: they cannot.
    """
    if path.is_dir():
        raise ConfigError(f"--out {str(path)!r} is a directory: name a file in it")
    if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {str(path)!r}: its directory is not there or cannot be written to: name another one")


def write_results(path: Path, model: str, results: Sequence[Line]) -> None:
    """Writes the JSON object; what was in the file before is replaced."""
    write_file(path, results_json(model, results) + "\n")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The program's output: a result per set, and the responses to the first prompts of each set."""

    results: list[Line]
    samples: list[Line]


class OwnInstances:
    """Instances that `start` starts for one evaluation; none if running ones are named."""

    def __init__(self, config: Config) -> None:
        self.urls: Sequence[str] = config.pool.instances
        self._processes: Sequence[Process] = ()
        self._running: list[Running] = []
        self._starting: list[tuple[Running, str]] = []
        if not self.urls:
            ports = free_ports(num_ports(config))
            self._processes, self.urls = plan_instances(
                config, machine=this_machine(config.trainer.device), ports=ports
            )

    def start(self, deployment: Deployment) -> None:
        """At once, or never again."""
        if self._processes and not self._running:
            self._running = [deployment.start(process) for process in self._processes]
            self._starting = list(zip(self._running, self.urls, strict=True))

    @property
    def timeout_s(self) -> float:
        """Minimum time that the program has to wait for the instances."""
        return START_TIMEOUT_S if self._processes else 0.0

    def watch(self) -> None:
        """To be called repeatedly.

        Raises:
            ProcessFailed: one ended before it was healthy, or all have ended.
        """
        self._starting = [(instance, url) for instance, url in self._starting if not is_healthy(instance, url)]
        if self._running and all(instance.exit_code() is not None for instance in self._running):
            raise self._running[0].failure()


def evaluate(config_path: Path, overrides: Sequence[str], console: Console) -> Evaluation:
    """Starts the instances if needed, and runs the program until it finishes.

    Raises:
        ConfigError: a value is not usable.
        ProcessFailed: an instance did not start, or the program failed; with its last log lines.
    """
    config = load_config(config_path, overrides)
    if not config.evaluation.sets:
        raise ConfigError(f"{str(config_path)!r} has no [[evaluation.sets]]: add one with a name and a source")
    out = config.run.dir
    with console.status("evaluation: starting") as status:
        num_done = 0

        def show(finished: Sequence[Line]) -> None:
            nonlocal num_done
            num_done += len(finished)
            status.update(f"evaluation: {num_done} of {finished[-1]['total_prompts']} prompts")

        _run("async_rl.evaluation", (), config, (str(config_path), *overrides), show)
    results, responses = (RecordFile(out / name) for name in ("results.jsonl", "responses.jsonl"))
    return Evaluation(list(results.new_records()), list(responses.new_records()))


def evaluate_with_harness(
    options: argparse.Namespace, config_path: Path, overrides: Sequence[str], console: Console
) -> Any:
    """The same with the tasks of lm-eval that the options name: what `async_rl.evaluation.harness` writes."""
    config = load_config(config_path, overrides)
    require_extras("async-rl eval --harness", "harness")
    words = evaluate_options.harness_words(options, config)
    with console.status("evaluation: loading tasks") as status:

        def show(finished: Sequence[Line]) -> None:
            status.update(f"evaluation: {', '.join(finished[-1]['tasks'])}")

        _run("async_rl.evaluation.harness", words, config, (str(config_path), *overrides), show)
    return json.loads((config.run.dir / "harness.json").read_text(encoding="utf-8"))


def _run(
    module: str,
    options: Sequence[str],
    config: Config,
    config_words: Sequence[str],
    show: Callable[[Sequence[Line]], None],
) -> None:
    """Runs a program beside the instances that it waits for, and shows what it records of its progress.

    It loads at the same time as they. One with `options` loads before they start, until its first record.
    """
    serves = not config.pool.instances
    serves_itself = serves and config.inference.engine == "transformers"
    require_extras("async-rl eval", "trainer", *(("serve",) if serves_itself else ()))
    require_no_run(config.run.dir)
    # The default limit of prompts may be beyond a small model; the program measures the prompts there are.
    started = with_room(config, ModelFiles.find(config.model.path)) if serves else config
    require_sound(started, trains=False, serves=serves)
    out = config.run.dir
    with Deployment() as deployment:
        instances = OwnInstances(started)
        if not options:
            instances.start(deployment)
        argv = (
            *(sys.executable, "-m", module, *config_words, "--out", str(out), *options),
            *("--pool.instances", json.dumps(list(instances.urls))),
            *("--pool.timeout_s", str(max(config.pool.timeout_s, instances.timeout_s))),
        )
        env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        progress = RecordFile(out / "progress.jsonl")
        # What an earlier one left in the directory does not count.
        list(progress.new_records())

        def watch() -> None:
            instances.watch()
            if finished := list(progress.new_records()):
                instances.start(deployment)
                show(finished)

        deployment.run(Process("evaluation", "program", argv, log_path(out, "evaluation"), env=env), watch)


@contextmanager
def _config(
    options: argparse.Namespace, overrides: Sequence[str], console: Console
) -> Iterator[tuple[Path, Sequence[str], str]]:
    """The config that was named, or one that the options stand for, in a directory of its own; its overrides; and what
    is evaluated, by name.

    A checkpoint is made first of a run and of adapters, those of `adapter.path` among them.
    """
    path = evaluate_options.config_path(options)
    is_named = path is not None
    if not is_named:
        evaluate_options.require_reward(options, overrides)
    with temporary_directory("async-rl-eval-") as directory:
        made = str(directory / "model")
        words = None if is_named else evaluate_options.export_words(options)
        if path is None:
            path = directory / "evaluation.toml"
            _write_config(path, evaluate_options.config_text(options, directory, made if words else None))
        # What is wrong with other options is named before this, which may take minutes.
        config = load_config(path, overrides)
        if config.adapter.path is not None and not config.pool.instances:
            words = _words_of_adapters(config, words)
            overrides = (*overrides, f"--model.path={made}")
        if words:
            _export([*words, "--to", made], directory, console)
        yield path, overrides, evaluate_options.name_of(options, config)


def _words_of_adapters(config: Config, words: Sequence[str] | None) -> list[str]:
    """The arguments of `trainer.export` that merge the adapters with which a run of the config would begin.

    Raises:
        ConfigError: they do not fit its model; or `words`, of a run or of adapters, are there already.
    """
    path = str(config.adapter.path)
    if words:
        raise ConfigError(
            f"adapter.path {path!r} stands beside {words[0]!r}, which has adapters or is a run: leave it out"
        )
    require_adapters(config, ModelFiles.find(config.model.path))
    return [path, "--merge", "--dtype", "float32", "--model", config.model.path]


def _export(words: Sequence[str], directory: Path, console: Console) -> None:
    """Runs `async-rl export` with these arguments.

    Raises:
        ProcessFailed: it failed.
    """
    require_extras("async-rl eval", "trainer")
    argv = (sys.executable, "-m", "trainer.export", *words)
    with Deployment() as deployment, console.status(f"evaluation: making a checkpoint of {words[0]}"):
        deployment.run(Process("export", "program", argv, log_path(directory, "export")), lambda: None)


def _write_config(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"an argument is not UTF-8, as a config must be: {text[error.start - 20 : error.end]!r}"
        ) from error


def main(argv: Sequence[str]) -> int:
    options, overrides = evaluate_options.parse(argv)
    console = Console()
    stop_on_signals()
    try:
        if options.out is not None and not options.harness:
            require_writable(options.out)
        with _config(options, overrides, console) as (path, words, model):
            if options.harness:
                found = evaluate_with_harness(options, path, words, console)
            else:
                results = evaluate(path, words, console).results
        if options.harness:
            show_harness(console, found)
        else:
            show_results(console, results)
            if options.out is not None:
                write_results(options.out, model, results)
    except (Stopped, AsyncRLError) as end:
        report_end(end, os.environ)
        return explain_end(end)
    if options.json:
        print(json.dumps(found) if options.harness else results_json(model, results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
