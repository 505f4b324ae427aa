"""The records of a run that resumes from a checkpoint: lines of JSON, each of one iteration; for `trainer.session`."""

import json
import logging
from pathlib import Path

from async_rl.config.sections import RunSection
from async_rl.errors import ConfigError
from async_rl.records.rotation import SAMPLES, TIMELINE, Rotation
from async_rl.records.run_records import EVALUATIONS, LEDGER, METRICS, RecordFile, iteration_of
from async_rl.shared.files import write_file

log = logging.getLogger(__name__)

MAX_NAMED = 10

ROLLOUTS = "rollouts.jsonl"
"""How the rollouts of a program went in each iteration."""

RECORDS = (METRICS, LEDGER, EVALUATIONS, ROLLOUTS)
"""Files of a run directory, with a few lines of bounded size per iteration."""

CONFIG = "config.json"
"""The settings that the trainer was started with, secrets masked; of a run that resumed, the last ones."""

ROTATED = (TIMELINE, SAMPLES)
"""Further files, of bounded total size."""


def require_no_records(run: RunSection) -> None:
    """Refuses a directory with records of another run, unless the run resumes with them.

    Raises:
        ConfigError: it has some.
    """
    if not run.resume and _has_records(run.dir):
        raise holds_another_run(run)


def require_no_run(directory: Path) -> None:
    """Refuses the directory of a run for the files of something else.

    Raises:
        ConfigError: it has records of a run, or may not be read.
    """
    try:
        is_of_run = _has_records(directory)
    except OSError as error:
        raise ConfigError(f"{str(directory)!r} cannot be read: {error.strerror}; name another one") from error
    if is_of_run:
        raise ConfigError(f"{str(directory)!r} is the directory of a run: name another one for the results")


def _has_records(run_dir: Path) -> bool:
    return any((run_dir / name).exists() for name in RECORDS) or any(kind.parts(run_dir) for kind in ROTATED)


def holds_another_run(run: RunSection) -> ConfigError:
    return ConfigError(
        f"run.dir {str(run.dir)!r} holds the records of another run: name a new one, remove it, or set "
        "run.resume = true to go on with it"
    )


def cut_run_records(run_dir: Path, first_iteration: int) -> int:
    """Cuts all records of a run (see `cut_records`) to resume at `first_iteration`; returns how many lines."""
    num_cut = sum(cut_records(run_dir / name, first_iteration) for name in RECORDS)
    return num_cut + sum(_cut_rotated(kind, run_dir, first_iteration) for kind in ROTATED)


def require_proofs(run_dir: Path, num_iterations: int, *, accept: bool) -> None:
    """Checks that the ledger has a proof of each iteration that a checkpoint has behind it: each is written before the
    step that it is for, so one that is missing was lost afterwards.

    Args:
        accept: goes on without them, and says so.

    Raises:
        ConfigError: one is missing, and `accept` is false.
    """
    path = run_dir / LEDGER
    there = {iteration_of(line) for _, line in RecordFile(path).new_lines()}
    missing = [iteration for iteration in range(num_iterations) if iteration not in there]
    if not missing:
        return
    named = ", ".join(map(str, missing[:MAX_NAMED])) + (", ..." if len(missing) > MAX_NAMED else "")
    what = f"{str(path)!r} has no proof of {len(missing)} of the {num_iterations} trained iterations ({named})"
    if not accept:
        raise ConfigError(
            f"{what}: restore the file from a copy, or set run.accept_changes = true to go on without them"
        )
    log.warning("%s: the run goes on without them (run.accept_changes)", what)


def cut_record_of(run_dir: Path, iteration: int) -> None:
    """Cuts what is written when an iteration ends, of this one: its record and its samples, not its proof or groups."""
    cut_records(run_dir / METRICS, iteration)
    _cut_rotated(SAMPLES, run_dir, iteration)


def _cut_rotated(kind: Rotation, run_dir: Path, first_iteration: int) -> int:
    """Cuts the newest files, and removes those that become empty; stops at the first file that needs no cut."""
    num_cut = 0
    for part in reversed(kind.parts(run_dir)):
        num_lines = cut_records(part, first_iteration)
        num_cut += num_lines
        if part.stat().st_size == 0 and part.name != kind.name:
            part.unlink()
        elif part.stat().st_size and not num_lines:
            break
    return num_cut


def cut_records(path: Path, first_iteration: int) -> int:
    """Removes the lines of `first_iteration` and later ones, which will be trained again; returns their number.

    An incomplete last line of an interrupted run is removed as well. The file is replaced atomically; if there is none,
    nothing happens.

    Raises:
        ConfigError: a line other than the last is not a record.
        WriteFailed: the file cannot be replaced.
    """
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for number, line in enumerate(lines) if _iteration(path, lines, number) < first_iteration]
    if len(kept) < len(lines):
        write_file(path, b"".join(kept))
    return len(lines) - len(kept)


def _iteration(path: Path, lines: list[bytes], number: int) -> float:
    """The iteration of a line; infinity for an incomplete last one."""
    line = lines[number]
    is_last = number == len(lines) - 1
    if is_last and not line.endswith(b"\n"):
        return float("inf")
    try:
        return int(json.loads(line)["iteration"])
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError(
            f"{str(path)!r}, line {number + 1} is not a record with an iteration: {line[:80]!r}; repair or remove it"
        ) from error
