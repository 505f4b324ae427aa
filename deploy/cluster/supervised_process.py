"""A process that is started again when it died: `Restarts` decides, and a launcher calls `check` periodically."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Literal

from async_rl.errors import ProcessFailed, RestartsExhausted
from deploy.cluster.process import Process, Running
from deploy.cluster.restarts import DONE, Restarts, may_restart

State = Literal["running", "waiting", "done", "failed"]
"""waiting: it died and is started again soon; done: it exited with 0; failed: it ended, and is not started again."""


ENDED: Final = ("done", "failed")


class SupervisedProcess:
    """A process that is started again when it died; `failure` is the error to raise once it has failed.

    Args:
        running: the process, started already.
        start: starts a process.
        restarts: decides.
        trained: iterations with its contribution so far, see `restarts.num_trained`.
        again: the words added to the command of a restart.
    """

    def __init__(
        self,
        running: Running,
        start: Callable[[Process], Running],
        restarts: Restarts,
        trained: Callable[[], int],
        again: tuple[str, ...] = (),
    ) -> None:
        self.restarts = restarts
        self.state: State = "running"
        self.failure: ProcessFailed | RestartsExhausted | None = None
        self.final_at_first: str | None = None
        """The name of an error that a first start is not repeated after."""
        self.cause: str | None = None
        """Why it was lost the last time, in words."""
        self._start = start
        self._trained = trained
        self._again = replace(running.process, argv=(*running.process.argv, *again))
        self._due_s = 0.0
        self._is_last = False
        self._killed_since: str | None = None
        restarts.note_progress(trained())
        self.running = running

    @property
    def process(self) -> Process:
        return self.running.process

    def restart_no_more(self) -> None:
        """Its next end is the last one: a restart would not help."""
        self._is_last = True

    def kill(self, why: str) -> None:
        """Ends it at once; it is started again as one that died, and `why` is told as the cause."""
        if self.state == "running":
            self._killed_since = why
            self.running.kill()

    def check(self) -> str | None:
        """Starts the process again when that is due; returns what has changed, in words, None if nothing has."""
        if self.state == "running" and (code := self.running.exit_code()) is not None:
            return self._after_end(code)
        if self.state == "waiting" and time.monotonic() >= self._due_s:
            self.running = self._start(self._again)
            self.state = "running"
            return f"{self.process.name} is started again (restart {self.restarts.total})"
        return None

    def _after_end(self, code: int) -> str:
        if code == DONE:
            self.state = "done"
            return f"{self.process.name} has ended"
        failure = self.running.failure()
        if self._killed_since is not None:
            failure, self._killed_since = ProcessFailed(f"{self.process.name} {self._killed_since}"), None
        self.cause = str(failure)
        self.restarts.note_progress(self._trained())
        is_first = self.restarts.total == 0
        is_final = failure.cause is not None and is_first and failure.cause == self.final_at_first
        if self._is_last or is_final or not may_restart(code, failure.cause):
            return self._fail(failure)
        delay_s = self.restarts.next_delay_s()
        if delay_s is None:
            return self._fail(self.restarts.exhausted(self.process.name, failure))
        self.state, self._due_s = "waiting", time.monotonic() + delay_s
        return f"lost {self.process.name}, it is started again in {delay_s:g} s: {failure}"

    def _fail(self, failure: ProcessFailed | RestartsExhausted) -> str:
        self.state, self.failure = "failed", failure
        return f"lost {self.process.name}, it is not started again: {failure}"
