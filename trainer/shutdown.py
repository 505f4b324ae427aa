"""How a run ends early: every rank is notified, all save the last consistent step together, within a time limit.

A rank that fails, or receives SIGTERM, posts this in the process group's store. Leaders check the store before each
window and while they wait for rollouts; they notify their followers. All ranks then meet and save (`synchronize` is a
collective that each rank also calls before whatever it does together with the ranks of other replicas: a publish, the
proof of a mini-batch, its step, the end; so ranks already waiting there take part). Gradients accumulated in the
unfinished iteration are discarded.

A run that another trainer has taken over saves nothing: its last checkpoint is the other one's.

After a failure that can be mended in place (`recovery.py`) the run goes on: `gather_after`, then `resume_run`.

If any of this hangs, on a lost rank or a file system, a thread ends the process after `checkpoint.grace_s`, with the
exit code of the error that ended the run if a restart would not mend that.
"""

import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from async_rl.errors import AsyncRLError, Fenced, LeaderFailed, RunStopped
from trainer.parallel import Parallel
from trainer.process_end import end_now
from trainer.stop_signal import StopSignal

log = logging.getLogger(__name__)

T = TypeVar("T")

_numbers = itertools.count()
"""Numbers what may end, one after the other: the runs of this process, and how each goes on. All ranks count the
same."""

EXIT_CODE = 1


class Shutdown:
    """One rank's part in the shutdown."""

    def __init__(self, parallel: Parallel, stop: StopSignal, grace_s: float) -> None:
        self._parallel = parallel
        self._stop = stop
        self._grace_s = grace_s
        self._store = dist.PrefixStore("async-rl", _get_default_store())
        self._key = f"shutdown/{next(_numbers)}"
        self._together = False
        self._phase = "ending"
        self._error: AsyncRLError | None = None
        self._watchdog: threading.Timer | None = None

    @property
    def is_requested(self) -> bool:
        """Whether this rank was requested to end."""
        return self._stop.is_requested

    def announce_stop(self) -> None:
        """Notifies all leaders if this rank was requested to end."""
        if self._stop.is_requested:
            self._post(self._stopped())

    def watch(self) -> None:
        """Checks for a shutdown; leaders call it before each window and regularly while they wait for rollouts.

        Raises:
            RunStopped, LeaderFailed: a rank was requested to end, or failed.
        """
        self.announce_stop()
        if self._store.check([self._key]):
            raise _error(self._store.get(self._key).decode())

    def synchronize(self, *, may_stop: bool) -> None:
        """Waits for all ranks, and continues unless one of them has failed or, with `may_stop`, was requested to end.

        Raises:
            RunStopped, LeaderFailed: on all ranks.
        """
        said = self._stopped() if may_stop and self._stop.is_requested else None
        found = [text for text in self._parallel.gather_json(said) if text]
        self._together = True
        if found:
            raise _error(found[0])

    def separate(self) -> None:
        """Until the next `synchronize` a rank may fail alone; from there to this call, failures are on all ranks."""
        self._together = False

    @contextmanager
    def together(self) -> Iterator[None]:
        """Meets for a collective of all ranks in the body; after it a rank may fail alone again.

        Raises:
            RunStopped, LeaderFailed: on all ranks, before the body.
        """
        self.synchronize(may_stop=False)
        yield
        self.separate()

    @contextmanager
    def saving(self, save: Callable[[], None]) -> Iterator[None]:
        """Wraps the loop: a run that ends early by a named error, or by SIGTERM, calls `save` on all ranks first."""
        self._stop.deferred = True
        try:
            yield
        except Fenced as error:
            self._limit_time()
            self._post(_encoded(error))
            raise
        except AsyncRLError as error:
            self._limit_time()
            self._save(error, save)
            raise
        except BaseException:
            self._limit_time()
            raise
        finally:
            self._stop.deferred = False

    def gather_after(self, error: AsyncRLError, said: T) -> list[T]:
        """Waits for all ranks after this one's `error`, within the time limit; returns what each of them has `said`.

        The others have an error by then, too. `said` is plain data.

        Raises:
            RuntimeError: a rank is gone.
        """
        self._error = error
        self._limit_time()
        self._meet_failed(error)
        return self._parallel.gather_json(said)

    def resume_run(self) -> None:
        """Ends the time limit, and forgets what failed. All ranks call it, together, and stay so until `separate`."""
        self.close()
        self._error, self._phase = None, "ending"
        self._key = f"shutdown/{next(_numbers)}"

    def on_main_rank(self, work: Callable[[], Any] | None) -> Any:
        """What `work` of the main rank returns, as plain data; the other ranks wait for it. All are together.

        Raises:
            AsyncRLError: the main rank's failure; on the others `LeaderFailed` or `RunStopped`.
        """
        if work is None:
            answer = self._parallel.broadcast_json(None)
            if "failed" in answer:
                raise _error(answer["failed"])
            return answer["done"]
        try:
            result = work()
        except AsyncRLError as error:
            self._parallel.broadcast_json({"failed": _encoded(error)})
            raise
        return self._parallel.broadcast_json({"done": result})["done"]

    def close(self) -> None:
        """Cancels the time limit: nothing is left that could hang."""
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    def _limit_time(self) -> None:
        if self._watchdog is None:
            self._watchdog = threading.Timer(self._grace_s, self._give_up)
            self._watchdog.daemon = True
            self._watchdog.start()

    def _meet_failed(self, error: AsyncRLError) -> None:
        if not self._together:
            self._phase = "waiting for the other training ranks to learn of it"
            text = _encoded(error)
            self._post(text)
            self._parallel.gather_json(text)
            self._together = True

    def _save(self, error: AsyncRLError, save: Callable[[], None]) -> None:
        self._error = error
        log.error("the run ends: %s: %s", type(error).__name__, error)
        try:
            self._meet_failed(error)
            self._phase = "saving a checkpoint"
            save()
        except Exception:
            # The error that ended the run is raised, not this one.
            log.exception("no checkpoint of the last sound step could be saved; the one before it stays")
        self._phase = "closing its connections"

    def _post(self, text: str) -> None:
        if not self._store.check([self._key]):
            self._store.set(self._key, text)

    def _stopped(self) -> str:
        return _encoded(RunStopped(f"training rank {self._parallel.rank} was told to end (SIGTERM)"))

    def _give_up(self) -> None:
        log.error(
            "the run did not end within checkpoint.grace_s = %g s, it was %s: it ends now; go on from the newest "
            "checkpoint with run.resume = true",
            self._grace_s,
            self._phase,
        )
        if self._error is not None and not self._error.may_pass:
            end_now(self._error)
        logging.shutdown()
        os._exit(EXIT_CODE)


def _encoded(error: AsyncRLError) -> str:
    return json.dumps([isinstance(error, RunStopped), f"{type(error).__name__}: {error}"])


def _error(encoded: str) -> AsyncRLError:
    """The error that another rank posted, as this rank raises it."""
    stopped, text = json.loads(encoded)
    return RunStopped(text.removeprefix("RunStopped: ")) if stopped else LeaderFailed(f"another training rank: {text}")
