"""The names of a run's checkpoints, in `checkpoints/` of its directory: one place says which of them are whole."""

import re
from pathlib import Path

MANIFEST = "manifest.json"

_NAME = re.compile(r"iteration-(\d{6,})")
"""A checkpoint has it once it is complete."""


def checkpoints_dir(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def number_in(name: str) -> int | None:
    """The number in the name of a complete checkpoint; None if it is none."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def whole_checkpoints(directory: Path) -> dict[Path, int]:
    """The checkpoints that were written completely, oldest first, and the numbers in their names."""
    if not directory.is_dir():
        return {}
    found = {path: number for path in directory.iterdir() if (number := number_in(path.name)) is not None}
    return dict(sorted(found.items(), key=lambda entry: entry[1]))


def newest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint to resume from; None if there is none."""
    return next(reversed(whole_checkpoints(directory)), None)
