"""Reports the named error that a process ended with to the program that started it, separately from its log.

The starter sets `VARIABLE` to a path; each process it starts writes a file of its own beside it. torchrun has a
variable of its own, and prints the last report written there.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from async_rl.errors import AsyncRLError, LeaderFailed
from async_rl.files import write_file

VARIABLE = "ASYNC_RL_FAILURE_FILE"
TORCHRUN_VARIABLE = "TORCHELASTIC_ERROR_FILE"


@dataclass(frozen=True, slots=True)
class Failure:
    """A named error: the name of its class, its message, and whether a restart may help."""

    kind: str
    message: str
    may_pass: bool


def report_failure(error: AsyncRLError, environment: Mapping[str, str]) -> None:
    """Writes `error` to the files that the program that started this one reads, if set; the first report stays."""
    kind, now = type(error).__name__, time.time()
    if VARIABLE in environment:
        content = {"kind": kind, "message": str(error), "may_pass": error.may_pass, "time": now}
        _write(Path(f"{environment[VARIABLE]}.{os.getpid()}"), content)
    if TORCHRUN_VARIABLE in environment:
        said = f"{kind}: {error}"
        extra = {"py_callstack": said, "timestamp": str(int(now))}
        _write(Path(environment[TORCHRUN_VARIABLE]), {"message": {"message": said, "extraInfo": extra}})


def read_failure(path: Path) -> Failure | None:
    """The processes' reports to `path`, the value of their `VARIABLE`: the first error that is not a consequence."""
    reports = [json.loads(file.read_text()) for file in path.parent.glob(f"{path.name}.*[0-9]")]
    reports.sort(key=lambda report: (report["kind"] == LeaderFailed.__name__, report["time"]))
    return Failure(*(reports[0][name] for name in ("kind", "message", "may_pass"))) if reports else None


def _write(path: Path, content: object) -> None:
    if not path.exists():
        write_file(path, json.dumps(content))
