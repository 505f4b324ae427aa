"""The producer as a child of the trainer's main rank."""

import logging
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from async_rl.config.sections import Config
from async_rl.errors import ProducerLost
from async_rl.producer.connection import Connection
from async_rl.producer.frames import error_from_data
from async_rl.shared.programs.process_guard import PRODUCER_MARK

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""For its imports, on a busy machine with a slow file system."""

END_TIMEOUT_S = 60.0
"""For ending rollouts, rewards, programs and trackers, which have limits of their own."""

POLL_S = 0.2
MAX_ROUNDS = 50
"""Something that is killed may have started something else meanwhile."""


class Given(msgspec.Struct):
    """What the main rank gives the producer: the config as JSON, the secret of all greetings, its lease, and where
    to listen."""

    config: str
    secret: str
    lease_name: str
    host: str


@dataclass(frozen=True, slots=True)
class ProducerAddress:
    """Where the ranks of a trainer reach its producer."""

    host: str
    port: int
    secret: str

    def connect(self, lost_after_s: float, *, replica: int | None = None) -> Connection:
        """A leader's connection, or without a replica that of the main rank.

        Raises:
            ProducerLost: nobody answers.
        """
        role = {"role": "control"} if replica is None else {"role": "rollouts", "replica": replica}
        return Connection((self.host, self.port), {"secret": self.secret, **role}, lost_after_s)


class ProducerProcess:
    """Starts the producer, and gives it the run; it listens at `host`, an address of this one."""

    def __init__(self, config: Config, lease_name: str, host: str) -> None:
        self._mark = secrets.token_hex()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "async_rl.producer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, PRODUCER_MARK: self._mark},
        )
        self._host, self._secret = host, secrets.token_hex()
        given = Given(config.model_dump_json(), self._secret, lease_name, host)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(given) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass

    def address(self, watch: Callable[[], None] = lambda: None) -> ProducerAddress:
        """Waits until it listens.

        Args:
            watch: called while it waits; an exception that it raises ends the wait.

        Raises:
            ConfigError: its address cannot be used.
            ProducerLost: it ended before, or took too long.
        """
        assert self._process.stdout is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while not select.select([self._process.stdout], [], [], POLL_S)[0]:
            watch()
            if time.monotonic() > deadline:
                raise ProducerLost(f"the producer did not start within {START_TIMEOUT_S:g} s: it hangs")
        line = self._process.stdout.readline()
        if not line:
            raise ProducerLost(
                f"the producer ended when it started, with exit code {self._process.wait()}: its last words are in the "
                "log"
            )
        said = msgspec.json.decode(line)
        if "failed" in said:
            raise error_from_data(said["failed"])
        return ProducerAddress(self._host, said["port"], self._secret)

    def end(self, timeout_s: float) -> None:
        """Waits for its end, which follows that of the main rank's connection; kills it after `timeout_s`.

        When it returns nothing of the process is left that could do anything.
        """
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            if timeout_s:
                log.error("the producer did not end within %g s, and is killed", timeout_s)
            self._process.kill()
            self._process.wait()
        kill_marked(self._mark)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # It ended before it had read all.
                pipe.close()


def kill_marked(mark: str) -> None:
    """Kills what a producer that has ended leaves behind, also in sessions of its own (Linux): code of users that holds
    the interpreter, or has started something, does not end with it."""
    wanted = f"{PRODUCER_MARK}={mark}\0".encode()
    for _ in range(MAX_ROUNDS):
        found = [entry for entry in Path("/proc").glob("[0-9]*") if wanted in _environment_of(entry)]
        for entry in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(int(entry.name), signal.SIGKILL)
        if not found:
            return
        time.sleep(POLL_S / 10)


def _environment_of(entry: Path) -> bytes:
    """As a process was started, each variable with a zero byte at its end; empty of one that has ended."""
    with suppress(OSError):
        return (entry / "environ").read_bytes()
    return b""
