"""Sends the starts of a process to its warm interpreter, in place of the function by which `subprocess` forks."""

import atexit
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from tests.support.warm.start import ROOT, Start, start_of

LENGTH = struct.Struct(">Q")
PID = struct.Struct(">i")
PADDING = "x" * 2**15
"""Room for the command line that a fork shows."""

POSSIBLE = sys.platform == "linux" and platform.machine() == "x86_64" and sys.version_info[:2] == (3, 11)


class WarmStarts:
    """The connection of this process to its own warm interpreter, which is its child.

    Args:
        connection: to one that exists; without it the first start of a program makes one, in 10 seconds.
        warm: the environment with which the interpreter was started.

    `is_on`: whether it is asked; while it is not, every start is an ordinary one.
    """

    is_on = True

    def __init__(self, connection: socket.socket | None, warm: Mapping[str, str]) -> None:
        self._connection = connection
        self._warm = dict(warm)
        self._lock = threading.Lock()
        self._fork_exec: Callable[..., int] = subprocess._fork_exec  # type: ignore[attr-defined]

    def install(self) -> None:
        """From now on `subprocess` asks here."""
        if POSSIBLE and not os.environ.get("ASYNC_RL_TESTS_COLD"):
            subprocess._fork_exec = self._start  # type: ignore[attr-defined]
            os.register_at_fork(after_in_child=self.uninstall)

    def uninstall(self) -> None:
        """In a fork, of which the interpreter is no child: starts are ordinary ones."""
        subprocess._fork_exec = self._fork_exec  # type: ignore[attr-defined]

    def _start(self, *arguments: Any) -> int:
        """The arguments are those of `_posixsubprocess.fork_exec` of Python 3.11."""
        words, _, close_fds, pass_fds, directory, environment, *rest = arguments
        standard_input, _, _, standard_output, _, standard_error, _, error_pipe, restores, session, group, *rest = rest
        gid, gids, uid, umask, before, *_ = rest
        is_plain = close_fds and set(pass_fds) == {error_pipe} and restores and (gid, gids, uid, umask) == _NOBODY_ELSE
        if not is_plain or not self.is_on:
            return self._fork_exec(*arguments)
        given = dict(os.environ) if environment is None else _environment_of(environment)
        start = start_of(words, given, directory, session, group, before, self._warm)
        if start is None:
            return self._fork_exec(*arguments)
        own = (standard_input, standard_output, standard_error)
        pid = self._ask(start, [*(n if n >= 0 else usual for usual, n in enumerate(own)), error_pipe])
        if pid is not None:
            return pid
        # It has said on standard error why it cannot be had here.
        self.uninstall()
        return self._fork_exec(*arguments)

    def _ask(self, start: Start, descriptors: list[int]) -> int | None:
        """The process id of the fork; None if the interpreter has ended.

        A handler that raises cannot come between question and answer, as it cannot in the function that this replaces.
        """
        with self._lock:
            if self._connection is None:
                self._connection = self._start_interpreter()
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                text = start.to_json()
                socket.send_fds(self._connection, [LENGTH.pack(len(text))], descriptors)
                self._connection.sendall(text)
                answer = self._connection.recv(PID.size, socket.MSG_WAITALL)
            except ConnectionError:
                return None
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return PID.unpack(answer)[0] if answer else None

    def _start_interpreter(self) -> socket.socket:
        mine, its = socket.socketpair()
        with its:
            words = [sys.executable, "-m", "tests.support.warm.interpreter", str(its.fileno()), PADDING]
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, env=self._warm, cwd=ROOT, pass_fds=[its.fileno()]
            )
        atexit.register(process.wait)
        atexit.register(mine.close)
        return mine


_NOBODY_ELSE = (None, None, None, -1)


def _environment_of(words: list[bytes]) -> dict[str, str]:
    return dict(os.fsdecode(word).split("=", 1) for word in words)
