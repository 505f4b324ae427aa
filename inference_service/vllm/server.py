"""Runs vLLM's own server as a child of `python -m inference_service --engine vllm`, from start to exit.

The child has its own session. It ends with this process, also if this process is killed; processes it leaves behind are
killed. A server that has lost its engine is killed too: it stops listening, but may wait minutes for a request that
the engine will never answer.
"""

import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path

import httpx

from async_rl.errors import NoAnswer, ProcessFailed
from async_rl.shared.net.http_client import HttpClient, answers_200
from async_rl.shared.protocol.inference import StartUpdateRequest
from async_rl.shared.protocol.routes import HEALTH, SLEEP
from inference_service.address import LEAVE_TIMEOUT_S, registration_of, url_of, warn_if_exposed
from inference_service.identity import new_boot_id
from inference_service.options import TOKEN_VARIABLE, Options
from inference_service.registration import Registration
from inference_service.vllm.command import Command, server_command
from inference_service.vllm.scratch import Scratch
from inference_service.vllm.versions import find_vllm

logger = logging.getLogger("inference_service")

POLL_S = 0.25
PROBE_TIMEOUT_S = 2.0
PROBE_INTERVAL_S = 1.0
SLEEP_TIMEOUT_S = 120.0
NOTE_INTERVAL_S = 30.0
"""Between two looks for segments of shared memory, once vLLM is ready; it makes nearly all of them before."""
NUM_LOST = 3
"""Probes in a row that find the engine lost before the server is killed."""
GRACE_S = 8.0
"""From SIGTERM to SIGKILL; less than the time that the process guard of a deployment gives this process."""

PR_SET_PDEATHSIG = 1


def serve_vllm(options: Options, listener: socket.socket, environment: Mapping[str, str]) -> None:
    """Runs vLLM at the address of `listener`; returns and raises as `supervise` does.

    `listener` is bound, but does not listen: while it is open no other process gets its port, and vLLM can use it.

    Raises:
        ConfigError: there is no usable vLLM, or the fleet could not reach it.
    """
    release = find_vllm(options.device, options.engine_options)
    token = environment.get(TOKEN_VARIABLE) or None
    boot_id = new_boot_id()
    registration = registration_of(options, listener, token, boot_id)
    warn_if_exposed(options.host, token)
    with Scratch(environment) as scratch:
        environment = {**environment, "TMPDIR": str(scratch.path)}
        command = server_command(options, release, listener.getsockname()[1], environment, boot_id)
        put_to_sleep = partial(_put_to_sleep, url_of(listener), token) if options.asleep else _stay_awake
        supervise(command, url_of(listener), registration, scratch, put_to_sleep)


def _put_to_sleep(url: str, token: str | None) -> None:
    """vLLM measures the device before it takes memory, so it begins awake.

    Raises:
        ProcessFailed: it refuses.
    """
    try:
        answer = HttpClient(url, SLEEP_TIMEOUT_S, token).post(f"{SLEEP}?level=2", StartUpdateRequest())
    except NoAnswer as error:
        raise ProcessFailed(f"vLLM did not go to sleep: {error}") from error
    if not answer.is_success:
        raise ProcessFailed(f"vLLM refuses to sleep: {answer.status} {answer.body[:200]!r}")


def _stay_awake() -> None:
    return None


def supervise(
    command: Command,
    url: str,
    registration: Registration | None,
    scratch: Scratch,
    when_ready: Callable[[], None] = _stay_awake,
) -> None:
    """Runs a server until its fleet releases it, or a signal raises SystemExit in this thread.

    With a fleet the first signal requests the release, while the server continues to serve; the second ends it at once.

    Raises:
        ProcessFailed: the server ended by itself, or lost its engine.
        FleetLost: no fleet has answered for `--patience-s`.
    """
    http = HttpClient(url, PROBE_TIMEOUT_S)
    with VllmProcess(command, scratch) as vllm:
        vllm.wait_until(lambda: answers_200(http, HEALTH))
        vllm.watch_engine(http)
        when_ready()
        logger.info("ready at %s", url)
        if registration is None:
            vllm.wait_until(lambda: False)
            return
        registration.start()
        try:
            vllm.wait_until(registration.leave_requested.is_set)
            registration.require_fleet()
        except SystemExit:
            registration.leave(LEAVE_TIMEOUT_S)
            raise


class VllmProcess:
    """vLLM's server and its workers as a context: leaving it ends them all."""

    def __init__(self, command: Command, scratch: Scratch) -> None:
        self._child = subprocess.Popen(
            command.argv,
            env=dict(command.env),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        self._scratch = scratch
        self._engine: EngineWatch | None = None
        self._next_note_s = self._next_probe_s = 0.0
        self._has_lost_engine = False

    def __enter__(self) -> "VllmProcess":
        return self

    def __exit__(self, *exception: object) -> None:
        # A second Ctrl-C must not interrupt the shutdown of the child.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        self._scratch.note_segments(_family(self._child.pid))
        if not self._has_lost_engine:
            self._child.terminate()
            try:
                self._child.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                logger.warning("vLLM did not end within %g s of SIGTERM: killing it", GRACE_S)
        with suppress(ProcessLookupError, PermissionError):  # PermissionError is raised by macOS for zombies.
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def watch_engine(self, http: HttpClient) -> None:
        """From now on the loss of the engine is the end of the server, which has just been healthy."""
        self._engine = EngineWatch(http, self._parts)
        self._next_note_s = 0.0

    def wait_until(self, is_reached: Callable[[], bool]) -> None:
        """Waits for a condition while vLLM runs.

        Raises:
            ProcessFailed: vLLM ended, or lost its engine.
        """
        while not is_reached():
            code = self._child.poll()
            if code is not None:
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                raise ProcessFailed(f"vLLM ended by itself, with {how}; its own lines above say why")
            self._look_after()
            time.sleep(POLL_S)

    def _look_after(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_note_s:
            self._scratch.note_segments(_family(self._child.pid))
            self._next_note_s = now_s + (PROBE_INTERVAL_S if self._engine is None else NOTE_INTERVAL_S)
        if self._engine is not None and now_s >= self._next_probe_s:
            if (loss := self._engine.find_loss()) is not None:
                self._has_lost_engine = True
                raise ProcessFailed(f"vLLM lost its engine ({loss}) and is killed; its own lines above say why")
            self._next_probe_s = time.monotonic() + PROBE_INTERVAL_S

    def _parts(self) -> frozenset[int]:
        """The processes that the server itself has started and that run: its engine among them."""
        family = _family(self._child.pid)
        return frozenset(pid for pid, parent in family.items() if parent == self._child.pid)


class EngineWatch:
    """Notices that a server has lost its engine, though it runs: that is final in vLLM.

    Created while the server is healthy, with what lists the processes that it has started.
    """

    def __init__(self, http: HttpClient, parts: Callable[[], frozenset[int]]) -> None:
        self._http = http
        self._parts = parts
        self._parts_when_healthy = parts()
        self._num_losses = 0

    def find_loss(self) -> str | None:
        """Asks the server; returns what shows the loss, once `NUM_LOST` calls in a row have found it.

        A server that is only slow loses nothing: it counts if it says that its engine has died (503), refuses
        connections, or does not answer and lacks a process that it had.
        """
        loss = self._loss()
        self._num_losses = 0 if loss is None else self._num_losses + 1
        return loss if self._num_losses >= NUM_LOST else None

    def _loss(self) -> str | None:
        try:
            status = self._http.get(HEALTH).status
        except NoAnswer as error:
            if isinstance(error.__cause__, httpx.ConnectError):
                return f"it takes no more connections: {error}"
            gone = self._parts_when_healthy - self._parts()
            return f"its process {min(gone)} has ended, and it does not answer" if gone else None
        return "it answers 503 to health checks" if status == HTTPStatus.SERVICE_UNAVAILABLE else None


def _family(leader: int) -> dict[int, int]:
    """The running processes of a session, each with its parent; none where the system does not list them in /proc."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The command's name, in brackets, may have spaces and brackets.
            state, parent, _, session = path.read_text(errors="replace").rpartition(")")[2].split()[:4]
            if int(session) == leader and state not in ("Z", "X"):
                found[int(path.parent.name)] = int(parent)
    return found


def _end_with_parent() -> None:
    """In the child before exec: vLLM receives SIGTERM when this process ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
