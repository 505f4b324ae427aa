"""Evaluates a model on this machine: `async-rl eval MODEL --data SOURCE (--reward NAME | --program NAME)`.

Starts instances of the model on this machine, or uses running ones, and samples and scores the data with them, through
the program `async_rl.evaluation`. Every process it started ends with it, however it ends.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from async_rl.config.file import load_config
from async_rl.config.sections import SINGLE_TURN, Config
from async_rl.errors import AsyncRLError, ConfigError, ProcessFailed
from async_rl.preflight import require_sound
from async_rl.programs.command_line import Parser
from async_rl.programs.extras import require_extras
from async_rl.tracking.records import require_no_run
from deploy.cluster.process import Process, Running, log_path
from deploy.cluster.run_view import JsonlTail
from deploy.cluster.stopping import Stopped, explain_end, stop_on_signals
from deploy.local.machine import free_ports, this_machine
from deploy.local.plan import num_ports, plan_instances
from deploy.local.processes import Deployment
from deploy.local.run import START_TIMEOUT_S, is_healthy

Line = Mapping[str, Any]
"""A line of the program's `results.jsonl` or `responses.jsonl`; see `async_rl/evaluation/output.py`."""


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """The options, and the config overrides."""
    parser = Parser(
        "async-rl eval",
        "Samples a model on held-out prompts and scores its responses: pass@k, mean reward, lengths. The options below "
        "set keys of the config by shorter names; other keys, such as --prompts.chat_template false, can be set too.",
        "MODEL --data SOURCE [--reward NAME] [--program NAME] [OPTIONS] [--section.key VALUE ...]",
        Config,
    )
    parser.add_argument("model", metavar="MODEL", help="Hugging Face checkpoint: a directory or a hub name")
    parser.add_argument("--data", required=True, help="a .jsonl or .parquet file, or reasoning-gym:TASK")
    parser.add_argument(
        "--reward",
        help="a built-in one, such as math, or python:path/to/file.py:function; none if a program rewards itself",
    )
    parser.add_argument(
        "--program",
        default=SINGLE_TURN,
        help="python:path/to/file.py:function or command:PROGRAM ARGUMENTS, each of whose runs is a sample; by default "
        "a single response",
    )
    parser.add_argument("--samples", type=int, default=1, help="responses to each prompt (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=512, help="of a response, or of all turns of a program (default: %(default)s)"
    )
    parser.add_argument("--max-prompts", type=int, help="take the first so many rows only")
    parser.add_argument(
        "--instances", help="base URLs of running instances, with commas between; else it starts its own"
    )
    parser.add_argument(
        "--engine", default="transformers", help="of its own: transformers or vllm (default: %(default)s)"
    )
    parser.add_argument("--num-instances", type=int, default=1, help="of its own (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object, on the last line")
    return parser.parse_args(argv), parser.overrides


def config_text(options: argparse.Namespace, run_dir: Path) -> str:
    """The options as a config in TOML, with one evaluation set."""
    values = {
        "run.dir": str(run_dir),
        "model.path": options.model,
        "prompts.source": options.data,
        "prompts.prompts_per_batch": 1,
        "rollout.program": options.program,
        "rollout.max_response_tokens": options.max_tokens,
        "pool.instances": options.instances.split(",") if options.instances else [],
        "train.iterations": 1,
        "inference.engine": options.engine,
        "inference.num_instances": options.num_instances,
    }
    if options.reward is not None:
        values["reward.name"] = options.reward
    the_set = {
        "name": set_name(options.data),
        "source": options.data,
        "num_samples": options.samples,
        "temperature": options.temperature,
    }
    if options.max_prompts is not None:
        the_set["max_prompts"] = options.max_prompts
    return f"{_toml_lines(values)}\n[[evaluation.sets]]\n{_toml_lines(the_set)}"


def _toml_lines(values: Mapping[str, Any]) -> str:
    # JSON strings, numbers and lists are also valid TOML.
    return "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())


def set_name(source: str) -> str:
    """The name of the set: the file's name without its suffix, or the task's name."""
    name = Path(source).stem if source.endswith((".jsonl", ".parquet")) else source.rpartition(":")[2]
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name) or "data"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The program's output: a result per set, and the responses to the first prompts of each set."""

    results: list[Line]
    samples: list[Line]


class OwnInstances:
    """Instances that are started for one evaluation; none if running ones are named."""

    def __init__(self, deployment: Deployment, config: Config) -> None:
        self.urls: Sequence[str] = config.pool.instances
        self._running: list[Running] = []
        if not self.urls:
            ports = free_ports(num_ports(config))
            processes, self.urls = plan_instances(config, machine=this_machine(config.trainer.device), ports=ports)
            self._running = [deployment.start(process) for process in processes]
        self._starting = list(zip(self._running, self.urls, strict=False))

    @property
    def timeout_s(self) -> float:
        """Minimum time that the program has to wait for the instances."""
        return START_TIMEOUT_S if self._running else 0.0

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

    The program loads at the same time as the instances, and waits for them.

    Raises:
        ConfigError: a value is not usable.
        ProcessFailed: an instance did not start, or the program failed; with its last log lines.
    """
    config = load_config(config_path, overrides)
    serves_itself = not config.pool.instances and config.inference.engine == "transformers"
    require_extras("async-rl eval", "trainer", *(("serve",) if serves_itself else ()))
    require_no_run(config.run.dir)
    require_sound(config, trains=False, serves=not config.pool.instances)
    out = config.run.dir
    with Deployment() as deployment, console.status("evaluation: starting") as status:
        instances = OwnInstances(deployment, config)
        argv = (
            *(sys.executable, "-m", "async_rl.evaluation", str(config_path), "--out", str(out), *overrides),
            *("--pool.instances", json.dumps(list(instances.urls))),
            *("--pool.timeout_s", str(max(config.pool.timeout_s, instances.timeout_s))),
        )
        env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        progress, num_done = JsonlTail(out / "progress.jsonl"), 0

        def show() -> None:
            nonlocal num_done
            instances.watch()
            if finished := progress.read_new():
                num_done += len(finished)
                status.update(f"evaluation: {num_done} of {finished[-1]['total_prompts']} prompts")

        deployment.run(Process("evaluation", "program", argv, log_path(out, "evaluation"), env=env), show)
    return Evaluation(_read_lines(out / "results.jsonl"), _read_lines(out / "responses.jsonl"))


def _read_lines(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def show_results(console: Console, results: Sequence[Line]) -> None:
    """One column per set, one row per metric."""
    table = Table(title="evaluation", title_justify="left")
    table.add_column("")
    for result in results:
        table.add_column(escape(result["set"]), justify="right")
    for key in results[0]:
        if key != "set":
            table.add_row(key, *(_shown(result.get(key)) for result in results))
    console.print(table)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))


@contextmanager
def _directory() -> Iterator[Path]:
    """A directory for config and logs; kept if a process failed, since the error names its log."""
    directory = Path(tempfile.mkdtemp(prefix="async-rl-eval-"))
    is_named = False
    try:
        yield directory
    except ProcessFailed:
        is_named = True
        raise
    finally:
        if not is_named:
            shutil.rmtree(directory, ignore_errors=True)


def _write_config(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"an argument is not UTF-8, as a config must be: {text[error.start - 20 : error.end]!r}"
        ) from error


def main(argv: Sequence[str]) -> int:
    options, overrides = parse(argv)
    console = Console()
    stop_on_signals()
    try:
        with _directory() as directory:
            config_path = directory / "evaluation.toml"
            _write_config(config_path, config_text(options, directory))
            results = evaluate(config_path, overrides, console).results
    except (Stopped, AsyncRLError) as end:
        return explain_end(end)
    show_results(console, results)
    if options.json:
        print(json.dumps({"model": options.model, "sets": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
