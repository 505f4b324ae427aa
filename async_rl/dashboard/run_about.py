"""What a run is and how it stands, beside its records: its settings, whether it goes on, and by what it ended.

The trainer writes `config.json`, the lease says who trains, and a launcher leaves `launch.json`; any may be missing.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from async_rl.config.secrets import masked_text
from async_rl.locks.lease import holder_of, read_term
from async_rl.tracking.record_lines import record_of
from async_rl.tracking.records import CONFIG

NUM_LOG_LINES = 20
MAX_LOG_BYTES = 16_384
MAX_CAUSE_CHARACTERS = 4000


def about_run(run_dir: Path, num_trained: int, num_iterations: int | None) -> dict[str, Any]:
    """`state` in words; `cause` of a failure and the last lines of the trainer's `log`; `settings`: dotted key -> value
    as JSON."""
    trainer = _trainer_of(_object_in(run_dir / "launch.json"))
    state = _state(run_dir, num_trained, num_iterations, has_failed=trainer.get("state") == "failed")
    has_failed = state.startswith("failed")
    cause = str(trainer.get("cause") or "") if has_failed else ""
    log = run_dir / "logs" / Path(str(trainer.get("log") or "trainer.log")).name
    return {
        "state": state,
        "cause": masked_text(cause[:MAX_CAUSE_CHARACTERS]) or None,
        "log": _last_lines(log) if has_failed else [],
        "settings": dict(_flat(_object_in(run_dir / CONFIG))),
    }


def _state(run_dir: Path, num_trained: int, num_iterations: int | None, *, has_failed: bool) -> str:
    term = read_term(run_dir)
    total = "" if num_iterations is None else f" of {num_iterations}"
    if holder_of(run_dir):
        return "running"
    if num_iterations is not None and num_trained >= num_iterations:
        return "finished"
    if has_failed:
        return f"failed after {num_trained}{total} iterations"
    if term is None:
        return f"{num_trained}{total} iterations are trained"
    how = "stopped" if term.released else "died"
    return f"{how} after {num_trained}{total} iterations"


def _trainer_of(launch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The launcher's record of the task that trains; of several the one that failed."""
    tasks = launch.get("tasks")
    known = [task for task in tasks if isinstance(task, dict)] if isinstance(tasks, list) else []
    trainers = [task for task in known if task.get("role") == "trainer"]
    return next((task for task in trainers if task.get("state") == "failed"), trainers[0] if trainers else {})


def _object_in(file: Path) -> Mapping[str, Any]:
    """What is in the file; nothing where it is missing, or is no object."""
    try:
        return record_of(file.read_bytes()) or {}
    except OSError:
        return {}


def _flat(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for section, settings in config.items():
        if isinstance(settings, dict):
            yield from ((f"{section}.{key}", json.dumps(value)) for key, value in settings.items())


def _last_lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - MAX_LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return masked_text(text).splitlines()[-NUM_LOG_LINES:]
