"""The first process of a training pod: `python -m deploy.kubernetes.training_pod -- torchrun ...`.

torchrun exits with 1 whatever its ranks exited with. Kubernetes decides by the exit code whether to start the pod
again, so this program starts torchrun and exits with the code that the ranks' error stands for.

Exit codes: 0 trained to the end, 1 a fault that may pass with a restart, 2 bad input, 4 a fault that no restart mends,
5 fenced: another trainer has taken over the run, 143 ended by SIGTERM.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from async_rl import errors
from async_rl.errors import ConfigError, Fenced, RunStopped
from async_rl.programs.failure_report import TORCHRUN_VARIABLE
from deploy.cluster.restarts import BAD_INPUT, DONE, FENCED, LASTING, TOLD

MAY_PASS = 1


def exit_code(code: int, kind: str | None, *, told: bool) -> int:
    """The pod's exit code.

    Args:
        code: torchrun's.
        kind: the name of the error that a rank reported first, None if none did.
        told: whether the pod was told to end.
    """
    if code == 0:
        return DONE
    if kind == RunStopped.__name__ or (told and kind is None):
        return TOLD
    if kind == Fenced.__name__:
        return FENCED
    if kind == ConfigError.__name__:
        return BAD_INPUT
    return MAY_PASS if kind is None or getattr(errors, kind).may_pass else LASTING


def main(argv: Sequence[str]) -> int:
    """Runs the command after `--` until it ends; SIGTERM and SIGINT are passed on to it."""
    command = list(argv[argv.index("--") + 1 :])
    was_told = False
    child: subprocess.Popen[bytes] | None = None

    def pass_on(signum: int, _frame: FrameType | None) -> None:
        nonlocal was_told
        was_told = True
        if child is not None:
            child.send_signal(signum)

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, pass_on)
    with tempfile.TemporaryDirectory(prefix="async-rl-report-") as folder:
        report = Path(folder) / "error.json"
        # torchrun copies there what the first rank that failed has reported.
        child = subprocess.Popen(command, env={**os.environ, TORCHRUN_VARIABLE: str(report)})
        if was_told:
            child.terminate()
        code = child.wait()
        kind = _kind(report)
    return exit_code(code, kind, told=was_told)


def _kind(report: Path) -> str | None:
    """The name of our error in a report of torchrun; None if it has none, as after a signal."""
    if not report.exists():
        return None
    message = json.loads(report.read_text())["message"]
    # torchrun reports its own exceptions in the same way, or as a plain text.
    kind = message["message"].partition(":")[0] if isinstance(message, dict) else ""
    return kind if hasattr(errors, kind) else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
