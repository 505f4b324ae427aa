"""Runs vLLM's own server as a child of `python -m inference_service --engine vllm`, from start to exit.

The child has its own session. It ends with this process, also if this process is killed; processes it leaves behind are
killed.
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

from async_rl.errors import ProcessFailed
from async_rl.net.http_client import HttpClient, answers_200
from async_rl.protocol.routes import HEALTH
from inference_service.address import LEAVE_TIMEOUT_S, registration_of, url_of, warn_if_exposed
from inference_service.identity import new_boot_id
from inference_service.options import TOKEN_VARIABLE, Options
from inference_service.registration import Registration
from inference_service.vllm.command import Command, server_command
from inference_service.vllm.versions import find_vllm

logger = logging.getLogger("inference_service")

POLL_S = 0.25
PROBE_TIMEOUT_S = 2.0
GRACE_S = 8.0
"""From SIGTERM to SIGKILL; less than the time that the process guard of a deployment gives this process."""

PR_SET_PDEATHSIG = 1


def serve_vllm(options: Options, listener: socket.socket, environment: Mapping[str, str]) -> None:
    """Runs vLLM at the address of `listener`; returns and raises as `supervise` does.

    `listener` is bound, but does not listen: while it is open no other process gets its port, and vLLM can use it.

    Raises:
        ConfigError: there is no usable vLLM, or the fleet could not reach it.
    """
    release = find_vllm(options.device)
    token = environment.get(TOKEN_VARIABLE) or None
    boot_id = new_boot_id()
    registration = registration_of(options, listener, token, boot_id)
    warn_if_exposed(options.host, token)
    command = server_command(options, release, listener.getsockname()[1], environment, boot_id)
    supervise(command, url_of(listener), registration)


def supervise(command: Command, url: str, registration: Registration | None) -> None:
    """Runs a server until its fleet releases it, or a signal raises SystemExit in this thread.

    With a fleet the first signal requests the release, while the server continues to serve; the second ends it at once.

    Raises:
        ProcessFailed: the server ended by itself.
        FleetLost: no fleet has answered for `--patience-s`.
    """
    http = HttpClient(url, PROBE_TIMEOUT_S)
    with VllmProcess(command) as vllm:
        vllm.wait_until(lambda: answers_200(http, HEALTH))
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

    def __init__(self, command: Command) -> None:
        self._child = subprocess.Popen(
            command.argv,
            env=dict(command.env),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )

    def __enter__(self) -> "VllmProcess":
        return self

    def __exit__(self, *exception: object) -> None:
        # A second Ctrl-C must not interrupt the shutdown of the child.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        self._child.terminate()
        try:
            self._child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            logger.warning("vLLM did not end within %g s of SIGTERM: killing it", GRACE_S)
        with suppress(ProcessLookupError, PermissionError):  # PermissionError is raised by macOS for zombies.
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def wait_until(self, is_reached: Callable[[], bool]) -> None:
        """Waits for a condition while vLLM runs.

        Raises:
            ProcessFailed: vLLM ended.
        """
        while not is_reached():
            code = self._child.poll()
            if code is not None:
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                raise ProcessFailed(f"vLLM ended by itself, with {how}; its own lines above say why")
            time.sleep(POLL_S)


def _end_with_parent() -> None:
    """In the child before exec: vLLM receives SIGTERM when this process ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
