"""`python -m async_rl.torchrun OPTIONS -m MODULE ...`: torchrun, with two options more; every launcher starts it.

- `--shutdown-timeout SECONDS` also in older torch: releases without it (2.11 is one) kill ranks 30 s after they asked
  them to end, which is too early for a checkpoint.
- `--stopped-after-s SECONDS`: a rank of this host that a signal has stopped for so long is killed, and reported as
  `RankLost`. Nobody else would notice where it is the only one.
"""

import os
import signal
import sys
import threading
from contextlib import suppress

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import PContext

from async_rl.errors import RankLost
from async_rl.shared.programs.failure_report import report_failure
from async_rl.shared.programs.process_guard import StopWatch

SHUTDOWN = "--shutdown-timeout"
STOPPED = "--stopped-after-s"


def kill_stopped(watch: StopWatch, closing: threading.Event) -> None:
    """Kills processes that it finds, until `closing` is set; torchrun then ends the other ranks."""
    while not closing.wait(watch.interval_s):
        for pid, description in watch.find().items():
            error = RankLost(f"{description}, and is killed; start the run again with run.resume = true")
            print(f"torchrun: RankLost: {error}", file=sys.stderr, flush=True)
            report_failure(error, os.environ)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def main(argv: list[str]) -> None:
    """As torchrun's own; `argv` are its words, our options and their values before `-m` among them."""
    known = {word for action in run.get_args_parser()._actions for word in action.option_strings}
    if SHUTDOWN in argv and SHUTDOWN not in known:
        argv, patience_s = _without(argv, SHUTDOWN)
        # The defaults of `death_sig` and `timeout`, which the agent leaves to it.
        PContext.close.__defaults__ = (None, int(patience_s))
    closing = threading.Event()
    if STOPPED in argv:
        argv, limit_s = _without(argv, STOPPED)
        watch = StopWatch(os.getpid(), float(limit_s))
        threading.Thread(target=kill_stopped, args=(watch, closing), name="async-rl-stopped", daemon=True).start()
    try:
        run.main(argv)
    finally:
        closing.set()


def _without(argv: list[str], option: str) -> tuple[list[str], str]:
    """The words without an option, and its value."""
    at = argv.index(option)
    return [*argv[:at], *argv[at + 2 :]], argv[at + 1]


if __name__ == "__main__":
    main(sys.argv[1:])
