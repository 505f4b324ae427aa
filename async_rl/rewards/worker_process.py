"""The trainer's end of one worker process: starts it, sends it groups, gets floats back, kills it.

A fresh interpreter runs `async_rl.rewards.worker`, not a fork: the trainer's threads, its torch and its network
connections stay out of it. Messages are pickles on the two pipes between parent and child, each after its length.
"""

import asyncio
import pickle
import struct
import sys
from asyncio.subprocess import PIPE, Process
from typing import Any

from async_rl.types import Prompt, Response

LENGTH = struct.Struct(">Q")


class WorkerFailed(Exception):
    """The reward raised in the worker; the text is its traceback."""


class WorkerDied(Exception):
    """The process ended without an answer."""


class WorkerProcess:
    """One worker; one call at a time. A call that does not come to its end leaves no process behind."""

    def __init__(self, reward_name: str) -> None:
        self._reward_name = reward_name
        self._process: Process | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Starts the process and waits until it has loaded the reward and scored nothing once.

        Raises:
            WorkerFailed, WorkerDied: the reward could not be loaded.
        """
        self.kill()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "async_rl.rewards.worker", self._reward_name, stdin=PIPE, stdout=PIPE
        )
        await self._receive()

    async def score(self, prompt: Prompt, responses: tuple[Response, ...]) -> list[float]:
        """What the reward function returns for the group.

        Raises:
            WorkerFailed, WorkerDied: see there.
        """
        assert self._process is not None and self._process.stdin is not None
        message = pickle.dumps((prompt, responses), protocol=pickle.HIGHEST_PROTOCOL)
        self._process.stdin.write(LENGTH.pack(len(message)) + message)
        returned: list[float] = await self._receive()
        return returned

    def kill(self) -> None:
        """Ends the process without waiting for it; the loop reaps it."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        self._process = None

    async def close(self) -> None:
        process = self._process
        self.kill()
        if process is not None:
            await process.wait()

    async def _receive(self) -> Any:
        """The next answer. Whatever ends the wait early, a timeout or a cancellation, ends the process too."""
        process = self._process
        assert process is not None and process.stdout is not None
        try:
            (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
            failed, answer = pickle.loads(await process.stdout.readexactly(length))
        except asyncio.IncompleteReadError as error:
            raise WorkerDied(f"exit code {await process.wait()}") from error
        except BaseException:
            self.kill()
            raise
        if failed:
            raise WorkerFailed(answer)
        return answer
