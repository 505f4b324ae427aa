"""Reports the named error that a process ended with to the program that started it, separately from its log.

The starter sets `VARIABLE` to a path; each process it starts writes a file of its own beside it. torchrun has a
variable of its own, and prints the last report written there.

Where a training rank dies torchrun sends SIGTERM to the others, as it does when it is told to end itself. So a rank's
`RunStopped` is the reason only if all ranks have reported something, and none an error before it: a rank that was
killed reports nothing.
"""

import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from async_rl.errors import AsyncRLError, LeaderFailed, ProcessFailed, RunStopped, WriteFailed
from async_rl.shared.files import write_file

log = logging.getLogger(__name__)

VARIABLE = "ASYNC_RL_FAILURE_FILE"
TORCHRUN_VARIABLE = "TORCHELASTIC_ERROR_FILE"
NUM_RANKS_VARIABLE = "LOCAL_WORLD_SIZE"
"""Set by torchrun: its processes on this host."""

UNNAMED = ""
"""The kind of an error that is none of ours: the log has it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A named error: the name of its class, its message, and whether a restart may help."""

    kind: str
    message: str
    may_pass: bool


def report_failure(error: AsyncRLError, environment: Mapping[str, str]) -> None:
    """Writes `error` to the files that the program that started this one reads, if set; the first report stays."""
    # What ended by another process's error hands that on.
    kind, now = (isinstance(error, ProcessFailed) and error.cause) or type(error).__name__, time.time()
    _report(kind, str(error), error.may_pass, now, environment)
    if TORCHRUN_VARIABLE in environment:
        said = f"{kind}: {error}"
        extra = {"py_callstack": said, "timestamp": str(int(now))}
        _write(Path(environment[TORCHRUN_VARIABLE]), {"message": {"message": said, "extraInfo": extra}})


def report_unnamed_failure(environment: Mapping[str, str]) -> None:
    """Notes that this process ends with an error that is none of ours; a report that it wrote before stays."""
    _report(UNNAMED, "", True, time.time(), environment)


def read_failure(path: Path) -> Failure | None:
    """The processes' reports to `path`, the value of their `VARIABLE`: the first error that is not a consequence; None
    if that has no name, or was not reported."""
    reports = [json.loads(file.read_text()) for file in path.parent.glob(f"{path.name}.*[0-9]")]
    reports.sort(key=lambda report: (report["kind"] == LeaderFailed.__name__, report["time"]))
    errors = [report for report in reports if report["kind"] not in (RunStopped.__name__, UNNAMED)]
    if not errors and reports and reports[0]["kind"] != UNNAMED and len(reports) >= reports[0]["num_ranks"]:
        errors = reports
    return Failure(*(errors[0][name] for name in ("kind", "message", "may_pass"))) if errors else None


def _report(kind: str, message: str, may_pass: bool, now: float, environment: Mapping[str, str]) -> None:
    if VARIABLE in environment:
        num_ranks = int(environment.get(NUM_RANKS_VARIABLE, "1"))
        content = {"kind": kind, "message": message, "may_pass": may_pass, "time": now, "num_ranks": num_ranks}
        _write(Path(f"{environment[VARIABLE]}.{os.getpid()}"), content)


def _write(path: Path, content: object) -> None:
    """Where that fails, as on a full disk, the program ends by the error itself all the same, which its log has."""
    if path.exists():
        return
    try:
        write_file(path, json.dumps(content))
    except WriteFailed as error:
        log.warning("the launcher will not know by which error this process ended: %s", error)
