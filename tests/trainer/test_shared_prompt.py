"""The layout `p r1 r2 ... rG`: rows, positions, labels and who sees whom."""

import random
from dataclasses import replace

import pytest
import torch

from async_rl.types import Group, Prompt, Response
from trainer.shared_prompt import make_micro_batch

CPU = torch.device("cpu")


@pytest.fixture
def group() -> Group:
    responses = tuple(
        Response(tokens, (0.0,) * len(tokens), "", "stop", (), "i") for tokens in ((20, 21, 22), (30,), (40, 41))
    )
    return Group(0, 4, Prompt("p", (10, 11), {}), responses, (0.0, 1.0, 0.0), "v", 0.0, 1.0)


def test_prompt_is_fed_once_and_last_tokens_not_at_all(group: Group) -> None:
    batch = make_micro_batch(group, CPU)
    assert batch.tokens_T.tolist() == [10, 11, 20, 21, 40]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 2]
    assert batch.lengths_G.tolist() == [3, 1, 2]


def test_every_response_token_is_a_label_of_the_row_before_it(group: Group) -> None:
    batch = make_micro_batch(group, CPU)
    assert batch.labels_N.tolist() == [20, 21, 22, 30, 40, 41]
    rows = (batch.label_rows_N + batch.first_label_row).tolist()
    assert [batch.tokens_T[row].item() for row in rows] == [11, 20, 21, 11, 11, 40]


def test_response_sees_its_prompt_and_itself_only(group: Group) -> None:
    assert make_micro_batch(group, CPU).segments.dense_mask_TT.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def test_group_with_an_empty_response_is_our_own_mistake(group: Group) -> None:
    empty = replace(group.responses[0], token_ids=())
    with pytest.raises(AssertionError, match="group 4 has a response without tokens"):
        make_micro_batch(replace(group, responses=(*group.responses, empty)), CPU)


def test_random_groups_keep_every_token_in_its_place() -> None:
    rng = random.Random(0)
    for _ in range(20):
        prompt = tuple(rng.randrange(1000) for _ in range(rng.randint(1, 9)))
        tokens = [tuple(rng.randrange(1000) for _ in range(rng.randint(1, 9))) for _ in range(rng.randint(1, 6))]
        responses = tuple(Response(t, (0.0,) * len(t), "", "stop", (), "i") for t in tokens)
        group = Group(0, 0, Prompt("p", prompt, {}), responses, (0.0,) * len(tokens), "v", 0.0, 1.0)
        batch = make_micro_batch(group, CPU)
        # What a label's row sees, in row order, is exactly the text before that label.
        before = [prompt + t[:i] for t in tokens for i in range(len(t))]
        for row, text in zip((batch.label_rows_N + batch.first_label_row).tolist(), before, strict=True):
            seen = batch.segments.dense_mask_TT[row].nonzero()[:, 0]
            assert tuple(batch.tokens_T[seen].tolist()) == text
            assert batch.positions_T[seen].tolist() == list(range(len(text)))
