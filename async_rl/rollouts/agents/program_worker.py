"""The worker process of a rollout program: `python -m async_rl.rollouts.agents.program_worker PROGRAM MARK`.

It imports the program and small shared types, and nothing of the trainer. Beside its result a rollout says ["generate",
request, arguments] and ["cancel", request], and is told ("turn" | "limit" | "invalid" | "closed", request, ...).
"""

import asyncio
import itertools
import operator
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from async_rl.errors import ConfigError
from async_rl.rollouts.agents.messages import InvalidRequest, Message, Tool
from async_rl.rollouts.agents.program import SETTING, ProgramPrompt, RolloutResult
from async_rl.rollouts.agents.turn import LimitReached, SessionClosed, Turn
from async_rl.shared.programs.user_file import is_async, load_from_file, traceback_of_user
from async_rl.shared.workers.child import Channel, Served, serve

MAX_OUTPUT_BYTES = 4 * 2**20
"""What a process may print in all; the rest is dropped."""


class WorkerPolicy:
    """Implements `Policy` over the channel of a rollout."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._channel.receive = self._receive
        self._loop = asyncio.get_running_loop()
        self._requests = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Turn]] = {}
        self._num_known = 0
        """Turns that the program has."""
        self._over: Exception | None = None

    async def generate(
        self,
        messages: Sequence[Message] | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        tools: Sequence[Tool] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Turn:
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(
                "policy.generate belongs to the event loop that runs the program: from another thread, use "
                "asyncio.run_coroutine_threadsafe with that loop"
            )
        if self._over is not None:
            raise self._over
        arguments = {
            "messages": messages,
            "token_ids": None if token_ids is None else _plain(token_ids),
            "tools": tools,
            "max_tokens": max_tokens,
            "stop": stop,
            "num_known": self._num_known,
        }
        request = next(self._requests)
        self._waiting[request] = future = self._loop.create_future()
        try:
            try:
                self._channel.say("generate", request, arguments)
            except (TypeError, ValueError) as error:
                raise InvalidRequest(f"the request cannot be written as JSON: {error}") from error
            turn: Turn = await future
            self._num_known += 1
            return turn
        except asyncio.CancelledError:
            self._channel.say("cancel", request)
            raise
        finally:
            del self._waiting[request]

    def _receive(self, kind: str, request: int, *values: Any) -> None:
        """Ends the wait for a request, if it still waits."""
        future = self._waiting.get(request)
        if future is None or future.done():
            return
        if kind == "turn":
            future.set_result(values[0])
            return
        error = {"limit": LimitReached, "closed": SessionClosed}.get(kind, InvalidRequest)(*values)
        future.set_exception(error)

    def end(self) -> None:
        """The rollout is over: whoever kept the policy, or waits for a turn of it, gets an error."""
        self._over = SessionClosed("the rollout has ended: its program gets no further turns")
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._over)


def _plain(token_ids: Sequence[int]) -> list[int]:
    """Integers of any kind, such as numpy's, as they are sent."""
    try:
        if not any(isinstance(token, bool) for token in token_ids):
            return [operator.index(token) for token in token_ids]
    except TypeError:
        pass
    raise InvalidRequest(f"token_ids is {token_ids!r:.80}: expected a list of integers from 0")


def limit_output() -> None:
    """Passes on the first `MAX_OUTPUT_BYTES` that this process and its children print, and drops the rest."""
    read_end, write_end = os.pipe()
    true_output = os.dup(sys.stderr.fileno())
    os.dup2(write_end, sys.stdout.fileno())
    os.dup2(write_end, sys.stderr.fileno())
    os.close(write_end)

    def pass_on() -> None:
        left = MAX_OUTPUT_BYTES
        while chunk := os.read(read_end, 2**16):
            if left > 0:
                os.write(true_output, chunk[:left])
                left -= len(chunk)
                if left <= 0:
                    os.write(true_output, b"\n[a rollout program prints too much: the rest is dropped]\n")

    threading.Thread(target=pass_on, daemon=True).start()


def load(name: str) -> Served:
    limit_output()
    function = load_from_file(SETTING, name)
    if not is_async(function):
        raise ConfigError(
            f"{SETTING} {name!r}: the function is not asynchronous, or a generator; write `async def`, without `yield`"
        )

    async def run(prompt: ProgramPrompt, channel: Channel) -> list[Any]:
        policy = WorkerPolicy(channel)
        try:
            result = RolloutResult.of(await function(prompt, policy))
        finally:
            policy.end()
        return [result.reward, result.turn_rewards]

    return Served(run, True, lambda error: [traceback_of_user(error), _is_limit(error)], ends_tasks=True)


def _is_limit(error: BaseException) -> bool:
    """Whether a program let `LimitReached` pass, possibly within an error that it caused, or a group of errors."""
    waiting: list[BaseException] = [error]
    # Causes may be many, and form a circle.
    seen: list[BaseException] = []
    while waiting:
        error = waiting.pop()
        if isinstance(error, LimitReached):
            return True
        if any(error is other for other in seen):
            continue
        seen.append(error)
        waiting += error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        waiting += () if error.__cause__ is None else (error.__cause__,)
    return False


if __name__ == "__main__":
    serve(load)
