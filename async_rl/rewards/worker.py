"""The worker process of a reward: `python -m async_rl.rewards.worker REWARD`, the config's section as JSON.

Reads calls from its standard input and writes results to its standard output until the input ends; what the reward
prints goes to standard error. It imports the reward and the shared types, and nothing of the trainer.

For a synchronous reward the main thread runs one call after the other; for an asynchronous one it has an event loop,
with all calls running concurrently. Any exception of a call, `SystemExit` and a cancellation too, is its result.
"""

import asyncio
import os
import pickle
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

from async_rl.config.reward_section import RewardSection
from async_rl.errors import ConfigError
from async_rl.programs.user_file import traceback_of_user
from async_rl.programs.user_process import LENGTH, messages, take_pipes
from async_rl.rewards import signatures
from async_rl.rewards.base import NotRewards, as_scores
from async_rl.rewards.function import Traits, load_function
from async_rl.rewards.worker_process import LOADED, Outcome, Place
from async_rl.types import Prompt, Response

STUCK_AFTER_S = 1.0
"""A cancelled call that has not ended after this time is reported with where it is; the parent then kills us.

One of a synchronous function, which nothing can end, is reported at once.
"""

OURS = (__file__, signatures.__file__)
"""What calls the function of a reward."""

Call = tuple[Prompt, tuple[Response, ...]] | None
"""The parent's request for a call number: to score this, or (None) to end."""


class Answers:
    """Sends results to the parent; used by all threads. It knows which calls are running."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._open: set[int] = set()

    def begin(self, number: int) -> None:
        with self._lock:
            self._open.add(number)

    def end(self, number: int, outcome: Outcome, answer: Any) -> None:
        """Sends a call's result, unless one was sent before."""
        message = pickle.dumps((number, outcome, answer), protocol=pickle.HIGHEST_PROTOCOL)
        with self._lock:
            if number not in self._open:
                return
            self._open.remove(number)
            self._file.write(LENGTH.pack(len(message)) + message)
            self._file.flush()


def main(config: RewardSection) -> None:
    requests, output = take_pipes()
    answers = Answers(output)
    answers.begin(LOADED)
    try:
        function = load_function(config)
        traits = Traits.of(function)
    except Exception as error:
        said = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        answers.end(LOADED, "failed", said)
        return
    serve = _serve_async if traits.is_async else _serve
    serve(function, requests, answers, lambda: answers.end(LOADED, "scored", traits))


def _serve(function: Any, requests: BinaryIO, answers: Answers, ready: Callable[[], None]) -> None:
    """Runs calls one after the other, in the main thread: some rewards limit themselves with signals."""
    calls: queue.SimpleQueue[tuple[int, Prompt, tuple[Response, ...]]] = queue.SimpleQueue()

    def receive(number: int, call: Call) -> None:
        if call is not None:
            calls.put((number, *call))

    _start_reader(requests, answers, receive, stuck_after_s=0.0)
    ready()
    while True:
        number, prompt, responses = calls.get()
        try:
            scores = as_scores(function(prompt, responses, prompt.row), len(responses))
        except BaseException as error:
            answers.end(number, "failed", _said(error))
        else:
            answers.end(number, "scored", scores)


def _serve_async(function: Any, requests: BinaryIO, answers: Answers, ready: Callable[[], None]) -> None:
    """Runs all calls concurrently, on an event loop in the main thread."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    tasks: dict[int, asyncio.Task[None]] = {}

    async def score(number: int, prompt: Prompt, responses: tuple[Response, ...]) -> None:
        try:
            scores = as_scores(await function(prompt, responses, prompt.row), len(responses))
        except BaseException as error:
            answers.end(number, "failed", _said(error))
        else:
            answers.end(number, "scored", scores)

    def forget(number: int) -> None:
        del tasks[number]
        # A task that was cancelled before its first step has not sent a result.
        answers.end(number, "failed", "it was cancelled before it began")

    def begin_or_end(number: int, call: Call) -> None:
        if call is not None:
            tasks[number] = loop.create_task(score(number, *call))
            tasks[number].add_done_callback(lambda _: forget(number))
        elif number in tasks:
            tasks[number].cancel()

    def receive(number: int, call: Call) -> None:
        loop.call_soon_threadsafe(begin_or_end, number, call)

    _start_reader(requests, answers, receive, STUCK_AFTER_S)
    ready()
    try:
        loop.run_forever()
    except BaseException:
        traceback.print_exc()
    # The reward stopped the loop, or a task of its own raised `SystemExit`; threads must not keep the process alive.
    os._exit(1)


def _start_reader(
    requests: BinaryIO, answers: Answers, receive: Callable[[int, Call], object], stuck_after_s: float
) -> None:
    """Reads in a thread of its own, so that the parent's end is detected while a reward computes."""

    def report(number: int) -> None:
        answers.end(number, "stuck", _where(main_thread))

    def read() -> None:
        for number, call in messages(requests):
            if call is None:
                timer = threading.Timer(stuck_after_s, report, [number])
                timer.daemon = True
                timer.start()
            else:
                answers.begin(number)
            receive(number, call)
        os._exit(0)

    main_thread = threading.get_ident()
    threading.Thread(target=read, daemon=True).start()


def _said(error: BaseException) -> str:
    """What is wrong with a call: what the function returned, or its traceback from its own frames on."""
    return str(error) if isinstance(error, NotRewards) else traceback_of_user(error)


def _where(thread: int) -> list[Place]:
    """Where the function is in a thread, from its own frames on."""
    frames = traceback.walk_stack(sys._current_frames()[thread])
    stack: list[Place] = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames]
    stack.reverse()
    first = max((i + 1 for i, (file, *_) in enumerate(stack) if file in OURS), default=0)
    return stack[first:] or stack


if __name__ == "__main__":
    main(RewardSection.model_validate_json(sys.argv[1]))
