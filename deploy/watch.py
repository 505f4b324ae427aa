"""`async-rl watch RUN`: the live view of a run that goes on or is over, from its files; plain lines without a terminal.

Ends when the run is over, or with Ctrl-C. Exit codes: 0 success, 2 no run there.
"""

import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from async_rl.errors import AsyncRLError, ConfigError
from async_rl.programs.command_line import USAGE_ERROR, Parser
from async_rl.tracking.lease import read_term
from async_rl.tracking.process_identity import has_died
from deploy.cluster.live_view import make_run_view
from deploy.cluster.run_view import JsonlTail, Record, RunView, shown_records

POLL_S = 0.5

OVER_AFTER_S = 90.0
"""A trainer that died may be started again: this long after its end, none was."""


def watch(run_dir: Path, console: Console, token: str | None) -> None:
    """Shows the run until it is over.

    Raises:
        ConfigError: there is no such directory.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"{str(run_dir)!r} is no directory: name the run.dir of a run")
    tail = JsonlTail(run_dir / "metrics.jsonl", from_start=True)
    with make_run_view(console, run_dir, token) as view:
        last = _show(view, tail)
        has_trainer_s = time.monotonic() if _has_trainer(run_dir) else -math.inf
        while not _is_trained(last) and time.monotonic() - has_trainer_s < OVER_AFTER_S:
            time.sleep(POLL_S)
            last = _show(view, tail) or last
            if _has_trainer(run_dir):
                has_trainer_s = time.monotonic()
        if last is None:
            view.note(f"{str(run_dir)!r} has no complete iteration, and no trainer is at work there")


def _show(view: RunView, tail: JsonlTail) -> Record | None:
    """Shows new records; returns the last one."""
    last = None
    for last in shown_records(tail.read_new()):
        view.show(last)
    return last


def _is_trained(last: Record | None) -> bool:
    return last is not None and bool(last["iteration"] + 1 >= last["iterations"])


def _has_trainer(run_dir: Path) -> bool:
    """Whether a trainer holds the run, as far as this host can tell."""
    term = read_term(run_dir)
    return term is not None and not term.released and not has_died(term.process)


def make_parser() -> Parser:
    parser = Parser("async-rl watch", "Shows a run that goes on or is over; Ctrl-C ends only the view.", "RUN")
    parser.add_argument("run", type=Path, metavar="RUN", help="run.dir of the run")
    return parser


def main(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    try:
        watch(options.run, Console(), os.environ.get("ASYNC_RL_TOKEN"))
    except AsyncRLError as error:
        print(f"async-rl watch: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
