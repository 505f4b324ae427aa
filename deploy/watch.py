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
from async_rl.records.run_records import METRICS, require_readable
from async_rl.shared.locks.lease import holder_of
from async_rl.shared.locks.process_identity import is_running
from async_rl.shared.programs.command_line import USAGE_ERROR, Parser
from async_rl.shared.programs.error_text import error_text
from deploy.cluster.live_view import make_run_view
from deploy.cluster.run_view import Record, RunFeed

POLL_S = 0.5

OVER_AFTER_S = 90.0
"""A trainer that died may be started again: this long after its end, none was."""


def watch(run_dir: Path, console: Console, token: str | None) -> None:
    """Shows the run until it is over.

    Raises:
        ConfigError: there is no such directory, or no run in it.
    """
    require_readable(run_dir, [METRICS])
    feed = RunFeed(run_dir, from_start=True)
    with make_run_view(console, run_dir, token) as view:
        last = first = feed.show_new(view)
        has_trainer_s = time.monotonic() if holder_of(run_dir) else -math.inf

        def is_over() -> bool:
            # A run that was over may be on its way to more iterations, which its records do not say yet.
            holder = holder_of(run_dir)
            is_resumed = last is first and holder is not None and is_running(holder.process)
            return (_is_trained(last) and not is_resumed) or time.monotonic() - has_trainer_s >= OVER_AFTER_S

        while not is_over():
            time.sleep(POLL_S)
            last = feed.show_new(view) or last
            if holder_of(run_dir):
                has_trainer_s = time.monotonic()
    if last is None:
        raise ConfigError(
            f"{str(run_dir)!r} has no complete iteration, and no trainer is at work there: name the run.dir of a run"
        )


def _is_trained(last: Record | None) -> bool:
    return last is not None and bool(last["iteration"] + 1 >= last["iterations"])


def make_parser() -> Parser:
    parser = Parser("async-rl watch", "Shows a run that goes on or is over; Ctrl-C ends only the view.", "RUN")
    parser.add_argument("run", type=Path, metavar="RUN", help="run.dir of the run")
    return parser


def main(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    try:
        watch(options.run, Console(), os.environ.get("ASYNC_RL_TOKEN"))
    except AsyncRLError as error:
        print(f"async-rl watch: {error_text(error)}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
