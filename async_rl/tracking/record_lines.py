"""Lines of a run's records as launchers and the dashboard read them: the trainer may be writing them, or have left them
broken.

What cannot be read is left out: a launcher's view of a run must not end it. The trainer names a broken record when it
resumes (`async_rl.tracking.records`).
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from async_rl.errors import ConfigError


def require_readable(run_dir: Path, names: Iterable[str]) -> None:
    """Checks what a user names before its records are read, where those that cannot be are left out.

    Raises:
        ConfigError: it is no directory, or a file of one of these names may not be read.
    """
    try:
        if not run_dir.is_dir():
            raise ConfigError(f"{str(run_dir)!r} is not a directory: name the run.dir of a run, such as runs/NAME")
        for name in names:
            if (run_dir / name).exists():
                (run_dir / name).open("rb").close()
    except OSError as error:
        raise ConfigError(
            f"{error.filename or str(run_dir)!r} cannot be read: {error.strerror}; name the run.dir of a run, and use "
            "an account that may read its records"
        ) from error


def whole_lines(file: Path) -> list[bytes]:
    """The lines that are written to their end; none where the file is missing, or cannot be read at the moment."""
    try:
        return file.read_bytes().split(b"\n")[:-1]
    except OSError:
        return []


def record_of(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None if there is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


FIGURE = re.compile(r"avg@|pass@|reward|response_tokens|truncated")
"""How the names of an evaluation's figures begin."""


def describe_evaluation(record: Mapping[str, Any]) -> str:
    """A line of `evaluations.jsonl` in words: its figures and what they cost; of an incomplete one, what to do."""
    head = f"evaluation at iteration {record.get('iteration')}, {record.get('set')}: "
    known = {name: value for name, each in record.items() if (value := number_of(each)) is not None}
    done, total, failed = (known.get(name, 0) for name in ("num_prompts", "total_prompts", "num_failed"))
    cost = f"{known.get('seconds', 0.0):.1f} s, training waited {known.get('delay_s', 0.0):.1f} s for it"
    if done >= total:
        figures = "".join(f"{name} {value:.3f}, " for name, value in known.items() if FIGURE.match(name))
        return f"{head}{figures}{done} of {total} prompts, {cost}"
    if failed:
        return f"{head}no figures: {failed} of {total} prompts failed, see the trainer's log; {cost}"
    return f"{head}NO FIGURES: {done} of {total} prompts were answered before training had to go on; {cost}"


def number_of(value: Any) -> float | None:
    """A finite number; None for anything else, `true` and numbers beyond the range of floats included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:
        return None
