"""What a run leaves, in words: how to look at it, use it and go on with it; printed by the launchers that stay."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from async_rl.config.secrets import masked_words
from async_rl.config.sections import Config
from async_rl.errors import AsyncRLError, RunDirInUse
from async_rl.records.records import CONFIG
from async_rl.records.run_records import METRICS, RunRecords, has_iteration, number_of, object_in
from async_rl.shared.checkpoint_names import checkpoints_dir, whole_checkpoints
from async_rl.shared.programs.command_line import USAGE_ERROR
from deploy.cluster.run_view import RunView
from deploy.cluster.stopping import Stopped, explain_end

MAX_NAMED = 10


def num_saved(run_dir: Path) -> int | None:
    """How many iterations the newest checkpoint has behind it; None without one."""
    found = whole_checkpoints(checkpoints_dir(run_dir))
    # A folder that was renamed has another number in its manifest.
    return next((number for path, number in reversed(found.items()) if number == _iteration_of(path)), None)


def _iteration_of(checkpoint: Path) -> Any:
    content = object_in(checkpoint / "manifest.json").get("content")
    return content.get("iteration") if isinstance(content, dict) else None


def num_iterations(config: Config) -> int | None:
    """Of the whole run. Of epochs the trainer makes a number, and writes it to `run.dir`: None before that."""
    if config.train.epochs is None:
        return config.train.num_iterations
    train = object_in(config.run.dir / CONFIG).get("train")
    if not isinstance(train, dict) or train.get("epochs") != config.train.epochs:
        return None
    found = number_of(train.get("iterations"))
    return None if found is None else int(found)


def is_finished(config: Config) -> bool:
    """Whether the run in `run.dir` is trained to its end and its model is written."""
    saved, total = num_saved(config.run.dir), num_iterations(config)
    return saved is not None and total is not None and saved >= total and (config.run.dir / "model").is_dir()


def describe_end(config: Config) -> str:
    """After the last iteration: where the model is, what the evaluations say, and the commands that go on from here."""
    run_dir = config.run.dir
    name, model = shlex.quote(str(run_dir)), shlex.quote(str(run_dir / "model"))
    exported = "the adapters alone, or with --merge the model; both " if config.adapter.is_given else ""
    evaluations = evaluation_lines(run_dir) or [f"none; async-rl eval {model} --data SOURCE --reward NAME makes one"]
    rows = [
        ("model", f"{run_dir / 'model'}, a Hugging Face checkpoint"),
        *(("evaluation", line) for line in evaluations),
        ("look at it", f"async-rl dashboard {name}"),
        ("one file", f"async-rl report {name}"),
        ("hand it on", f"async-rl export {name} --to DIR, {exported}with a model card"),
    ]
    skipped = [iteration for iteration, num in _skipped_steps(run_dir).items() if num]
    if skipped:
        named = ", ".join(map(str, skipped[:MAX_NAMED])) + (", ..." if len(skipped) > MAX_NAMED else "")
        rows.insert(0, ("no step", f"in {len(skipped)} iterations ({named}): their gradients were not finite"))
    return "\n".join([f"the run is trained: {_length(config)}", *_table(rows)])


def _skipped_steps(run_dir: Path) -> dict[int, int]:
    """Of each iteration in the records."""
    records = filter(has_iteration, RunRecords(run_dir).metrics.new_records())
    return {record["iteration"]: int(number_of(record.get("skipped_steps")) or 0) for record in records}


def describe_finished(config: Config) -> str:
    """Where a run is to go on that has trained all its iterations."""
    epochs, iterations = config.train.epochs, config.train.iterations
    more = f"--train.iterations {2 * iterations}" if iterations else f"--train.epochs {2 * (epochs or 1):g}"
    return (
        f"{str(config.run.dir)!r} is finished: all {_length(config)} are trained, and nothing is started; {more} would "
        f"train as many again\n{describe_end(config)}"
    )


def _length(config: Config) -> str:
    total, epochs = num_iterations(config), config.train.epochs
    said = [f"{total} iterations"] if total is not None else []
    return ", ".join([*said, f"train.epochs = {epochs:g}"] if epochs is not None else said)


def describe_saved(config: Config, command: Sequence[str]) -> str:
    """After an early end: what is saved, and the command that goes on; `command` is the one that started the run."""
    saved = num_saved(config.run.dir)
    if saved is None:
        if not (config.run.dir / METRICS).exists():
            return "nothing is saved: no iteration was trained"
        why = "checkpoint.every is 0" if not config.checkpoint.every else "no checkpoint was written"
        return f"nothing is saved, {why}: to begin again, name another run.dir or remove {str(config.run.dir)!r}"
    words = [word for word in command if not word.startswith("--run.resume")]
    again = shlex.join(masked_words([*words, "--run.resume=true"]))
    total = f"{num_iterations(config) or 'its'} iterations"
    return f"saved in {str(config.run.dir / 'checkpoints')!r}: {saved} of {total}; go on with\n  {again}"


def evaluation_lines(run_dir: Path) -> list[str]:
    """The first and the last complete evaluation of each set, in a line each."""
    by_set: dict[str, list[Mapping[str, Any]]] = {}
    for record in RunRecords(run_dir).evaluations.new_records():
        if record.get("complete") is True:
            by_set.setdefault(str(record.get("set")), []).append(record)
    return [f"{name}: {_change(records[0], records[-1])}" for name, records in by_set.items()]


def _change(first: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    figure = f"avg@{last.get('num_samples')}"
    name = figure if number_of(last.get(figure)) is not None else "reward_mean"
    before, after = (number_of(record.get(name)) for record in (first, last))
    if before is None or after is None:
        return "no figure"
    where = f"iteration {last.get('iteration')}"
    return f"{name} {after:.3f} at {where}" + ("" if first is last else f", {before:.3f} at {first.get('iteration')}")


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    return [f"  {name:<12}{text}" for name, text in rows]


def explain_end_of_run(end: Stopped | AsyncRLError, config: Config | None, command: Sequence[str]) -> int:
    """Prints on standard error why a run ended early, what is saved and how it goes on; returns the exit code.

    Args:
        config: of the run; None if it could not be read.
        command: the words that started it.
    """
    code = explain_end(end)
    # What is saved in a directory that another run uses is that one's.
    is_others = RunDirInUse.__name__ in (type(end).__name__, getattr(end, "cause", None))
    if config is not None and code != USAGE_ERROR and not is_others:
        say(Console(stderr=True), describe_saved(config, command))
    return code


@contextmanager
def said_when_stopped(view: RunView) -> Iterator[None]:
    """Says at once what a signal to stop does: the end takes as long as the last checkpoint."""
    try:
        yield
    except Stopped as stopped:
        view.note(f"{stopped}: the trainer saves its last whole iteration and ends; stop once more to wait no longer")
        raise


def say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
