"""The worker's way back to its parent, from many threads; the process itself is in test_process_reward.py."""

import io
import pickle
import threading
from random import Random
from typing import Any

from async_rl.programs.user_process import LENGTH, messages
from async_rl.rewards.worker import Answers


def messages_in(file: io.BytesIO) -> list[Any]:
    return list(messages(io.BytesIO(file.getvalue())))


def test_messages_end_where_the_parent_was_killed_amid_one() -> None:
    texts = [pickle.dumps(value) for value in ("one", "x" * 500)]
    data = b"".join(LENGTH.pack(len(text)) + text for text in texts)
    whole = LENGTH.size + len(texts[0])
    for cut in range(len(data)):
        assert list(messages(io.BytesIO(data[:cut]))) == (["one"] if cut >= whole else [])
    assert list(messages(io.BytesIO(data))) == ["one", "x" * 500]


def test_every_call_is_answered_once_whoever_is_first_and_answers_do_not_mix() -> None:
    file = io.BytesIO()
    answers = Answers(file)
    for number in range(200):
        answers.begin(number)

    def answer(who: int) -> None:
        rng = Random(who)
        for number in rng.sample(range(200), 200):
            answers.end(number, "scored", [float(who)] * rng.randrange(50))

    threads = [threading.Thread(target=answer, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = messages_in(file)
    assert sorted(number for number, _, _ in found) == list(range(200))
    assert all(outcome == "scored" and len(set(values)) <= 1 for _, outcome, values in found)


def test_a_call_that_was_not_begun_is_not_answered_and_one_may_be_begun_again() -> None:
    file = io.BytesIO()
    answers = Answers(file)
    answers.end(1, "failed", "late")
    answers.begin(1)
    answers.end(1, "stuck", "here")
    answers.end(1, "scored", [1.0])
    answers.begin(1)
    answers.end(1, "scored", [2.0])
    assert messages_in(file) == [(1, "stuck", "here"), (1, "scored", [2.0])]
