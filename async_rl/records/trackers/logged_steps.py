"""How far a run was logged to a tracker that cannot take steps back: a resumed run logs no step twice.

`run.dir/trackers/NAME.json`; read when the run starts, and written after each step by the tracker's thread.
"""

import json
import secrets
from pathlib import Path

from async_rl.shared.files import write_file

DIRECTORY = "trackers"


class LoggedSteps:
    """The last step of each kind (`metrics`, `samples`, `evaluation`), and the run's key at the tracker."""

    def __init__(self, run_dir: Path, tracker: str) -> None:
        self._path = run_dir / DIRECTORY / f"{tracker}.json"
        self.key, self._last = self._read()

    def is_new(self, kind: str, step: int) -> bool:
        return step > self._last.get(kind, -1)

    def mark_logged(self, kind: str, step: int) -> None:
        """
        Raises:
            WriteFailed: the file cannot be written.
        """
        self._last[kind] = step
        self._path.parent.mkdir(exist_ok=True)
        write_file(self._path, json.dumps({"key": self.key, "last": self._last}))

    def _read(self) -> tuple[str, dict[str, int]]:
        try:
            found = json.loads(self._path.read_bytes())
            return str(found["key"]), {str(kind): int(step) for kind, step in found["last"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            # There is none yet, or it is broken: the tracker gets another run.
            return secrets.token_hex(4), {}
