"""The lease on a run's directory: which trainer may change its files and its instances; several hosts may share it.

    RUN/.lease/run          the run's uid, as long as the directory exists
    RUN/.lease/00000003     the newest term: who holds it, and a count that its holder renews

A trainer takes the next term by creating its file exclusively, and then removes the older ones. Someone else may do so
after a clean end, after the death of the holder on the same host, or when the file has not changed for the holder's
`ttl_s` by the clock of whoever takes over: clocks of different hosts are not compared. A holder that finds its file
gone is fenced. Files are opened anew each time they are read, since file systems over a network are consistent only
then. `run_lock.py` is the faster check where both trainers run on one host.

Between a check and what follows it, a process may be stopped for any time: what it does first when it goes on cannot
be prevented here. So checkpoints have the term in their partial name, and instances refuse the older term.
"""

import json
import logging
import os
import platform
import re
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from async_rl.errors import AsyncRLError, Fenced, RunDirInUse
from async_rl.shared.files import named_write_errors, write_file
from async_rl.shared.locks.process_identity import ProcessIdentity, has_died, this_process

log = logging.getLogger(__name__)

LEASE_DIR = ".lease"
UID_FILE = "run"

TTL_S = 20.0
"""A trainer without a sign of life for so long may be replaced: longer than a file system over a network is away, and
short beside the restart that follows."""

RENEWALS_PER_TTL = 4
POLL_S = 0.2

_TERM = re.compile(r"\d{8,}")

Clock = Callable[[], float]
Sleep = Callable[[float], object]


@dataclass(frozen=True, slots=True)
class Term:
    """The content of a term's file. `host` and `process` say who holds it; `ttl_s` is the time after which others may
    take over where `renewals` does not change; `released` after a clean end."""

    run: str
    term: int
    host: str
    process: ProcessIdentity
    ttl_s: float
    renewals: int = 0
    released: bool = False


_TERM_CONTENT: Final = TypeAdapter(Term)


def read_term(run_dir: Path) -> Term | None:
    """The newest term of a run's directory; None before the first one, and while its file is being written or cannot be
    read."""
    directory = run_dir / LEASE_DIR
    with suppress(OSError):
        if number := _newest(directory):
            return _parsed(_path(directory, number).read_bytes())
    return None


def holder_of(run_dir: Path) -> Term | None:
    """The term of the trainer that holds a run's directory, as far as can be known here; None where none does."""
    term = read_term(run_dir)
    return None if term is None or term.released or has_died(term.process) else term


class Lease:
    """One term of a run's directory, from `take_lease` to `release`; its methods may be called from any thread."""

    def __init__(self, directory: Path, term: Term, clock: Clock = time.monotonic) -> None:
        self._directory = directory
        self._term = term
        self._clock = clock
        self._renewed_s = clock()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def run(self) -> str:
        """The run's uid."""
        return self._term.run

    @property
    def term(self) -> int:
        return self._term.term

    @property
    def name(self) -> str:
        """`RUN_UID:TERM`, as instances are told."""
        return f"{self._term.run}:{self._term.term}"

    def keep(self, on_loss: Callable[[Fenced], object]) -> None:
        """Renews the term from now on, in a daemon thread, which calls `on_loss` when someone else has taken over."""
        self._thread = threading.Thread(target=self._keep, args=(on_loss,), name="async-rl-lease", daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Checks that no one else has taken over; reads the directory.

        Raises:
            Fenced: someone has.
            WriteFailed: the directory cannot be read.
        """
        with named_write_errors(self._directory):
            newest = _newest(self._directory)
            is_there = _exists(_path(self._directory, self.term))
        if newest != self.term or not is_there:
            raise Fenced(
                f"term {self.term} of run.dir {str(self._directory.parent)!r} has ended: {self._successor(newest)}; "
                f"this trainer was last known to be running {self._clock() - self._renewed_s:.0f} s ago, its lease "
                f"holds for {self._term.ttl_s:g} s"
            )

    def renew(self) -> None:
        """Shows that this holder is alive.

        Raises:
            Fenced: someone else has taken over.
            WriteFailed: the file cannot be written.
        """
        with self._lock:
            self.require()
            self._write(replace(self._term, renewals=self._term.renewals + 1))
            self._renewed_s = self._clock()

    def release(self) -> None:
        """Ends the term, so that the next trainer need not wait; does nothing if the term is lost already."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(self._term.ttl_s)
        try:
            with self._lock:
                self.require()
                self._write(replace(self._term, released=True))
        except AsyncRLError as error:
            log.warning("the lease is not released: %s", error)

    def _keep(self, on_loss: Callable[[Fenced], object]) -> None:
        while not self._ended.wait(self._term.ttl_s / RENEWALS_PER_TTL):
            try:
                self.renew()
            except Fenced as error:
                on_loss(error)
                return
            except AsyncRLError as error:
                # A file system that is away for a moment; nobody can take over meanwhile without being noticed later.
                log.warning("the lease cannot be renewed, trying on: %s", error)

    def _write(self, term: Term) -> None:
        path = _path(self._directory, self.term)
        with named_write_errors(path):
            try:
                # In place: a reader on another host would go on seeing a file that was replaced.
                descriptor = os.open(path, os.O_WRONLY)
            except FileNotFoundError as error:
                raise Fenced(f"{str(path)!r} is gone: another trainer has taken over the run") from error
            with os.fdopen(descriptor, "wb") as file:
                file.write(_encoded(term))
                file.truncate()
                file.flush()
                os.fsync(file.fileno())
        self._term = term

    def _successor(self, newest: int) -> str:
        successor = read_term(self._directory.parent)
        if newest <= self.term or successor is None:
            return "its file was removed"
        return f"{successor.host} (process {successor.process.pid}) has taken over with term {successor.term}"


def lease_of(run_dir: Path, name: str) -> Lease:
    """The lease called `name`, which another process of the same trainer holds: for `require` only.

    Raises:
        Fenced: another trainer has taken over.
    """
    term = read_term(run_dir)
    if term is None or f"{term.run}:{term.term}" != name:
        raise Fenced(f"run.dir {str(run_dir)!r} is held under another lease than {name!r} by now")
    return Lease(run_dir / LEASE_DIR, term)


def take_lease(run_dir: Path, ttl_s: float, clock: Clock = time.monotonic, sleep: Sleep = time.sleep) -> Lease:
    """Takes the next term of a run's directory, which exists; waits while the last holder may still be alive.

    Args:
        ttl_s: how long others must see no sign of this holder before they take over.

    Raises:
        RunDirInUse: another trainer holds it, and is alive.
        WriteFailed: its files cannot be written.
    """
    directory = run_dir / LEASE_DIR
    with named_write_errors(directory):
        directory.mkdir(exist_ok=True)
    while True:
        newest = _newest(directory)
        if newest:
            _wait_until_free(directory, newest, ttl_s, clock, sleep)
        if (lease := _create(directory, newest + 1, ttl_s, clock)) is not None:
            return lease


def _wait_until_free(directory: Path, number: int, own_ttl_s: float, clock: Clock, sleep: Sleep) -> None:
    """Returns when the newest term may be followed by another one, or has been.

    Raises:
        RunDirInUse: its holder renews it.
    """
    path = _path(directory, number)
    first = _content(path)
    seen_s, has_logged = clock(), False
    while _newest(directory) == number:
        content = _content(path)
        term = _parsed(content)
        if term is not None and (term.released or has_died(term.process)):
            return
        if content != first and _parsed(first) is not None:
            raise _in_use(directory, term)
        if content != first:
            # It was being written, or was removed by hand.
            first, seen_s = content, clock()
        ttl_s = term.ttl_s if term is not None else own_ttl_s
        if clock() - seen_s > ttl_s:
            log.warning("the trainer that held run.dir has shown no sign of life for %g s: taking over", ttl_s)
            return
        if not has_logged:
            has_logged = True
            log.info("another trainer held run.dir and did not release it; watching for %g s if it is alive", ttl_s)
        sleep(POLL_S)


def _create(directory: Path, number: int, ttl_s: float, clock: Clock) -> Lease | None:
    """The lease of that term, or None if someone else was faster."""
    path, uid_file = _path(directory, number), directory / UID_FILE
    with named_write_errors(path):
        uid = uid_file.read_text().strip() if uid_file.exists() else secrets.token_hex(8)
        term = Term(uid, number, platform.node(), this_process(), ttl_s)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return None
        with os.fdopen(descriptor, "wb") as file:
            file.write(_encoded(term))
            file.flush()
            os.fsync(file.fileno())
        # Someone may have taken this term and released it, and another one the next, since the terms were listed.
        if _newest(directory) != number:
            path.unlink(missing_ok=True)
            return None
        if not uid_file.exists():
            write_file(uid_file, uid + "\n")
        for older in _terms(directory):
            if older < number:
                _path(directory, older).unlink(missing_ok=True)
    return Lease(directory, term, clock)


def _terms(directory: Path) -> list[int]:
    """The terms that have a file; other files of any name, left by whatever, are ignored."""
    try:
        return [int(path.name) for path in directory.iterdir() if _TERM.fullmatch(path.name)]
    except FileNotFoundError:
        return []


def _newest(directory: Path) -> int:
    """The newest term, 0 before the first."""
    return max(_terms(directory), default=0)


def _path(directory: Path, number: int) -> Path:
    return directory / f"{number:08}"


def _exists(path: Path) -> bool:
    """By opening it: over a network, `stat` may answer from memory."""
    try:
        os.close(os.open(path, os.O_RDONLY))
    except FileNotFoundError:
        return False
    return True


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _encoded(term: Term) -> bytes:
    return (json.dumps(asdict(term)) + "\n").encode()


def _parsed(content: bytes) -> Term | None:
    """None for a file that is being written, or that something else has written."""
    try:
        return _TERM_CONTENT.validate_json(content)
    except ValidationError:
        return None


def _in_use(directory: Path, term: Term | None) -> RunDirInUse:
    holder = f"{term.host} (process {term.process.pid}, term {term.term})" if term is not None else "another trainer"
    return RunDirInUse(
        f"run.dir {str(directory.parent)!r} is in use by {holder}, which is alive: wait for its end, or name another "
        "directory"
    )
