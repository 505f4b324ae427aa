import hashlib
import random

import pytest

from async_rl.method.proof.prompt_ids import MAX_CHARACTERS, as_runs, digest_of_ids, from_runs


@pytest.mark.parametrize(
    ("prompt_ids", "runs"),
    [
        ([], []),
        (["5"], ["5"]),
        ([str(i) for i in range(8192)], ["0-8191"]),
        (["0", "1", "2", "70"], ["0-2", "70"]),
        (["3", "2", "1"], ["3", "2", "1"]),  # places have an order
        (["7", "7", "8", "8"], ["7", "7-8", "8"]),  # twice is twice
        (["007", "008", "row-1", "row-2", "", "-1", "1-2-3"], ["007", "008", "row-1", "row-2", "", "-1", "1-2-3"]),
        (["9", "10", "", "11"], ["9-10", "", "11"]),
        (["１", "２"], ["１", "２"]),  # digits, but not as str(int) writes them
    ],
)
def test_ids_come_back_from_their_runs(prompt_ids: list[str], runs: list[str]) -> None:
    assert as_runs(prompt_ids) == runs
    assert from_runs(runs) == prompt_ids


def test_any_small_batch_comes_back_whatever_its_order() -> None:
    draw = random.Random(0)
    for size in range(150):
        prompt_ids = [str(draw.randrange(300)) for _ in range(size)]
        runs = as_runs(prompt_ids)
        assert runs is not None and from_runs(runs) == prompt_ids


def test_the_ids_of_rows_that_list_them_all_read_as_they_are() -> None:
    every = [str(i) for i in (4, 5, 6, 0)]
    assert from_runs(every) == every


def test_ids_that_take_too_much_room_or_look_like_runs_have_a_digest_only() -> None:
    shuffled = random.Random(0).sample([str(i) for i in range(8192)], 8192)
    assert as_runs(shuffled) is None
    assert as_runs(["x" * (MAX_CHARACTERS + 1)]) is None
    assert as_runs(["1", "3-5"]) is None


def test_the_digest_is_that_of_the_ids_a_line_each() -> None:
    assert digest_of_ids(["12", "3"]) == hashlib.sha256(b"12\n3\n").hexdigest()
    assert digest_of_ids(["3", "12"]) != digest_of_ids(["12", "3"]) != digest_of_ids(["1", "23"])
