"""Lines of a run's records as launchers and the dashboard read them: the trainer may be writing them, or have left them
broken.

What cannot be read is left out: a launcher's view of a run must not end it. The trainer names a broken record when it
resumes (`async_rl.tracking.records`).
"""

import json
from pathlib import Path
from typing import Any


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
