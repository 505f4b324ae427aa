"""The worker process of a synchronous reward: `python -m async_rl.rewards.worker REWARD_NAME`.

Reads groups from its standard input and answers on its standard output until the input ends; what the reward prints
goes to standard error. It imports the reward and the words it speaks, and nothing of the trainer.
"""

import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from typing import Any, BinaryIO

from async_rl.rewards.base import as_rewards
from async_rl.rewards.function import load_function
from async_rl.rewards.worker_process import LENGTH
from async_rl.types import Prompt, Response


def main(reward_name: str) -> None:
    # Ctrl-C goes to the whole group of processes; the trainer ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    groups: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    # Its own thread, so that the parent's end is noticed while a reward computes. The reward has the main thread,
    # because some limit themselves with signals.
    threading.Thread(target=_read, args=(requests, groups), daemon=True).start()
    try:
        function = load_function(reward_name)
    except Exception as error:
        _answer(answers, True, f"{type(error).__name__}: {error}")
        return
    _answer(answers, False, None)
    while True:
        prompt, responses = pickle.loads(groups.get())
        failed, answer = _score(function, prompt, responses)
        _answer(answers, failed, answer)


def _score(function: Any, prompt: Prompt, responses: tuple[Response, ...]) -> tuple[bool, Any]:
    try:
        return False, as_rewards(function(prompt, responses, prompt.row), len(responses))
    except Exception:
        return True, traceback.format_exc()


def _read(requests: BinaryIO, groups: "queue.SimpleQueue[bytes]") -> None:
    while header := requests.read(LENGTH.size):
        (length,) = LENGTH.unpack(header)
        groups.put(requests.read(length))
    os._exit(0)


def _answer(answers: BinaryIO, failed: bool, answer: Any) -> None:
    message = pickle.dumps((failed, answer), protocol=pickle.HIGHEST_PROTOCOL)
    answers.write(LENGTH.pack(len(message)) + message)
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
