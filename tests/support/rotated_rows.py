"""What rotated files have."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from async_rl.records.rotation import Rotation


def rotated_rows(kind: Rotation, run_dir: Path) -> Iterator[dict[str, Any]]:
    """The rows of all files, oldest first; an incomplete last line is left out."""
    lines = (line for part in kind.parts(run_dir) for line in part.read_bytes().splitlines(keepends=True))
    return (json.loads(line) for line in lines if line.endswith(b"\n"))
