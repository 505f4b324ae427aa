"""The names of a run's checkpoints, in `checkpoints/` of its directory: one place says which of them are whole."""

import re
from pathlib import Path

_NAME = re.compile(r"iteration-(\d{6,})")
"""A checkpoint has it once it is complete."""


def checkpoints_dir(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def whole_checkpoints(directory: Path) -> dict[Path, int]:
    """The checkpoints that were written completely, oldest first, and the numbers in their names."""
    if not directory.is_dir():
        return {}
    found = {path: int(match[1]) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items(), key=lambda entry: entry[1]))


def newest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint to resume from; None if there is none."""
    return next(reversed(whole_checkpoints(directory)), None)
