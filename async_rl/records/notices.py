"""What a run warns of, for whoever watches it: the main rank's warnings, also in `logs/notices.jsonl`.

A log of thousands of lines is read when something has failed; that prompts were left out, settings changed or nothing
is learned should be seen before. `trainer.session` records them, launchers and `async-rl watch` show them. A line
has the Unix time `unix_s` and the `text`.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from async_rl.errors import WriteFailed
from async_rl.records.run_records import NOTICES
from async_rl.shared.files import append_lines

OWN = ("async_rl", "trainer")
"""Loggers whose warnings count; those of libraries stay in the log."""

SHUTDOWN = "trainer.shutdown"
"""Logs the error that ends the run, which a launcher shows itself."""

MAX_PER_PERIOD = 5
PERIOD_S = 60.0
"""At most so many notices of one place in the code within this time: a place may warn of every response."""


class _Notices(logging.Handler):
    def __init__(self, run_dir: Path, clock: Callable[[], float]) -> None:
        super().__init__(logging.WARNING)
        self._path = run_dir / NOTICES
        self._clock = clock
        self._said_s: dict[tuple[str, int], list[float]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.partition(".")[0] not in OWN or record.name == SHUTDOWN:
            return
        now = self._clock()
        said_s = [s for s in self._said_s.get((record.pathname, record.lineno), []) if now - s < PERIOD_S]
        if len(said_s) < MAX_PER_PERIOD:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                append_lines(self._path, [json.dumps({"unix_s": time.time(), "text": record.getMessage()})])
            except (OSError, WriteFailed):
                # The log has it, and a disk that takes no lines is reported by the records.
                return
            said_s.append(now)
        self._said_s[record.pathname, record.lineno] = said_s


@contextmanager
def recorded_notices(run_dir: Path, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Within its body, warnings and errors that this process logs go to the run's notices, too."""
    handler = _Notices(run_dir, clock)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
