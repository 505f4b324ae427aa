"""The layout `p1 p2 ... | r11 ... r1G r21 ...`: rows, positions, labels and who sees whom."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from async_rl.method.token_arrays import ExpertIds
from async_rl.method.types import Group
from tests.support.groups import make_group, make_response, random_group
from tests.support.trainer.branched_groups import branched_group, one_of_each_kind
from trainer.batching.group_slice import GroupSlice, num_rows, slices_of, split_slice
from trainer.batching.shared_prompt import (
    MicroBatch,
    RowShare,
    last_prompt_row,
    make_micro_batch,
    make_micro_group,
    make_prompt_rows,
)

CPU = torch.device("cpu")


def ragged_group(index: int, rng: random.Random) -> Group:
    # Every third has responses of one token only, and so no fed response row.
    longest = 1 if index % 3 == 2 else 9
    lens = [rng.randint(1, longest) for _ in range(rng.randint(1, 6))]
    return random_group(index, rng.randint(1, 9), lens, rng, vocab_size=10**6)


Make = Callable[[int, random.Random], Group]
MAKERS = (ragged_group, branched_group)


def two_groups() -> list[GroupSlice]:
    responses = [make_response(token_ids) for token_ids in ((20, 21, 22), (30,), (40, 41))]
    groups = [make_group(4, responses, prompt=(10, 11)), make_group(7, [make_response((50, 51))], prompt=(12,))]
    return slices_of(groups)


def micro_batch_texts(batch: MicroBatch) -> list[tuple[int, ...]]:
    """What each label's row sees, in order of positions, checked to be 0, 1, 2, ..."""
    texts = []
    for row in batch.labels.logit_rows_R[batch.labels.label_rows_N]:
        seen = batch.rows.segments.dense_mask_TS[row].nonzero()[:, 0]
        assert batch.rows.positions_T[seen].tolist() == list(range(len(seen)))
        texts.append(tuple(batch.rows.tokens_T[seen].tolist()))
    return texts


def texts_before_tokens(slices: Sequence[GroupSlice]) -> list[tuple[int, ...]]:
    return [part.prompt + r.token_ids[:i] for part in slices for r in part.responses for i in r.sampled]


def test_prompts_come_first_and_once_and_last_tokens_are_not_fed() -> None:
    batch = make_micro_batch(two_groups(), CPU)
    assert batch.rows.tokens_T.tolist() == [10, 11, 12, 20, 21, 40, 50]
    assert batch.rows.positions_T.tolist() == [0, 1, 0, 2, 3, 2, 1]
    assert batch.labels.lengths_G.tolist() == [3, 1, 2, 2]


def test_every_response_token_is_a_label_of_the_row_before_it() -> None:
    batch = make_micro_batch(two_groups(), CPU)
    assert batch.labels.labels_N.tolist() == [20, 21, 22, 30, 40, 41, 50, 51]
    rows = batch.labels.logit_rows_R[batch.labels.label_rows_N]
    assert batch.rows.tokens_T[rows].tolist() == [11, 20, 21, 11, 11, 40, 12, 50]


def test_each_row_has_its_logits_once() -> None:
    rows = make_micro_batch(two_groups(), CPU).labels.logit_rows_R.tolist()
    assert sorted(rows) == [1, 2, 3, 4, 5, 6]


def with_named_routes(group: Group, base: int) -> Group:
    """Each row's two routes name it: those of the prompt count from `base`, a response's from 100 times its number."""

    def named(start: int, num_rows: int) -> ExpertIds:
        return ExpertIds(value for row in range(start, start + num_rows) for value in (row, row + 1))

    responses = [
        replace(response, routes=named(100 * number, len(response.token_ids) - 1))
        for number, response in enumerate(group.responses, start=1)
    ]
    responses[0] = replace(responses[0], prompt_routes=named(base, len(group.prompt.token_ids)))
    return replace(group, responses=tuple(responses))


def test_routes_are_those_of_their_rows_and_padding_has_those_of_the_first() -> None:
    groups = [with_named_routes(part.group, base) for part, base in zip(two_groups(), (1, 11), strict=True)]
    routes_TW = make_micro_batch(slices_of(groups), CPU, RowShare(4)).rows.routes_TW
    assert routes_TW is not None
    assert routes_TW.tolist() == [[n, n + 1] for n in (1, 2, 11, 100, 101, 300, 100, 1)]
    second = make_micro_batch(slices_of(groups), CPU, RowShare(4, rank=1, ways=2)).rows.routes_TW
    assert second is not None and second.tolist() == routes_TW[4:].tolist()
    whole, _ = slices_of(groups)
    prompt = make_prompt_rows(whole, CPU, RowShare(3)).routes_TW
    micro_group = make_micro_group(GroupSlice(whole.group, whole.prompt, [1, 2]), CPU, RowShare(3)).rows.routes_TW
    assert prompt is not None and prompt.tolist() == [[1, 2], [2, 3], [1, 2]]
    assert micro_group is not None and micro_group.tolist() == [[300, 301]] * 3
    of_ranks = [make_micro_batch(slices_of(groups), CPU, RowShare(4, rank, 2)).rows.routes_TW for rank in (0, 1)]
    assert torch.equal(torch.cat([part for part in of_ranks if part is not None]), routes_TW), "ranks share the rows"
    assert make_micro_batch(two_groups(), CPU).rows.routes_TW is None


def test_response_sees_its_prompt_and_itself_only() -> None:
    assert make_micro_batch(two_groups(), CPU).rows.segments.dense_mask_TS.int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 1, 0],
        [0, 0, 1, 0, 0, 0, 1],
    ]


def test_padding_sees_itself_only_and_nothing_sees_it() -> None:
    rows = make_micro_batch(two_groups(), CPU, RowShare(5)).rows
    mask = rows.segments.dense_mask_TS
    assert len(rows.tokens_T) == rows.segments.num_rows == 10
    assert mask[7:].int().tolist() == [[0] * 7 + row for row in ([1, 0, 0], [1, 1, 0], [1, 1, 1])]
    assert not mask[:7, 7:].any()


@pytest.mark.parametrize("make", MAKERS)
def test_random_groups_keep_every_token_in_its_place(make: Make, rng: random.Random) -> None:
    for _ in range(20):
        groups = [make(i, rng) for i in range(rng.randint(1, 5))]
        slices, multiple_of = slices_of(groups), rng.randint(1, 4)
        batch = make_micro_batch(slices, CPU, RowShare(multiple_of))
        assert micro_batch_texts(batch) == texts_before_tokens(slices)
        assert len(batch.rows.tokens_T) % multiple_of == 0
        num_fed = sum(num_rows(group) for group in groups)
        assert num_fed <= len(batch.rows.tokens_T) < num_fed + multiple_of


@pytest.mark.parametrize("make", MAKERS)
def test_no_attention_entry_is_empty(make: Make, rng: random.Random) -> None:
    for _ in range(20):
        groups = [make(rng.randrange(3), rng) for _ in range(rng.randint(1, 4))]
        segments = make_micro_batch(slices_of(groups), CPU, RowShare(rng.randint(1, 4))).rows.segments
        for part in filter(None, (segments.self_part, segments.cross_part)):
            assert all(part.q_lens) and all(part.kv_lens)


def test_micro_batch_without_groups_has_a_row_and_no_labels() -> None:
    batch = make_micro_batch([], CPU, RowShare(2))
    assert (len(batch.rows.tokens_T), len(batch.labels.labels_N)) == (2, 0)


def test_split_holds_every_response_once_within_the_bound(rng: random.Random) -> None:
    for _ in range(20):
        (whole,) = slices_of([ragged_group(0, rng)])
        most = rng.randint(1, 40)
        for with_prompt in (True, False):
            slices = split_slice(whole, most, with_prompt=with_prompt)
            assert [i for part in slices for i in part.indices] == whole.indices
            held = [part.num_rows if with_prompt else sum(part.fed_lens) for part in slices]
            assert all(rows <= most or len(part.indices) == 1 for rows, part in zip(held, slices, strict=True))


@pytest.mark.parametrize("make", MAKERS)
def test_micro_group_continues_the_prompt_of_the_first_stage(make: Make, rng: random.Random) -> None:
    for _ in range(20):
        whole, multiple_of = slices_of([make(rng.randrange(3), rng)])[-1], rng.randint(1, 4)
        prompt = make_prompt_rows(whole, CPU, RowShare(multiple_of))
        num_prompt = len(whole.prompt)
        assert prompt.tokens_T.tolist()[:num_prompt] == list(whole.prompt)
        for part in split_slice(whole, rng.randint(1, 20), with_prompt=False):
            batch = make_micro_group(part, CPU, RowShare(multiple_of))
            # Keys are those of both stages; the prompt's last row stands before the micro-group's rows.
            tokens_S = torch.cat([prompt.tokens_T, batch.rows.tokens_T])
            seen_S = [torch.arange(len(tokens_S)) < num_prompt, *batch.rows.segments.dense_mask_TS]
            logit_rows = batch.labels.logit_rows_R[batch.labels.label_rows_N]
            texts = [tuple(tokens_S[seen_S[row]].tolist()) for row in logit_rows]
            assert texts == texts_before_tokens([part])


def sources_of(batch: MicroBatch, first_row: int = 0) -> dict[int, tuple[int, int]]:
    """For each label's place in the micro-batch, its token and the number of the row among those of all ranks."""
    labels = batch.labels
    places = range(labels.num_labels) if labels.places_N is None else labels.places_N.tolist()
    rows = (labels.logit_rows_R[labels.label_rows_N] + first_row).tolist()
    return dict(zip(places, zip(labels.labels_N.tolist(), rows, strict=True), strict=True))


def judged_places(batch: MicroBatch) -> set[int]:
    labels, judged = batch.labels, batch.labels.judged
    assert judged is not None
    places = range(labels.num_labels) if labels.places_N is None else labels.places_N.tolist()
    return {place for place, index in zip(places, judged.index_N.tolist(), strict=True) if index >= 0}


@pytest.mark.parametrize("make", MAKERS)
def test_ranks_that_share_rows_have_each_row_and_each_label_once(make: Make, rng: random.Random) -> None:
    for _ in range(20):
        slices = slices_of([make(i, rng) for i in range(rng.randint(0, 3))])
        ways = rng.randint(2, 4)
        multiple_of = ways * rng.randint(1, 2)
        whole = make_micro_batch(slices, CPU, RowShare(multiple_of))
        shares = [RowShare(multiple_of, rank, ways) for rank in range(ways)]
        own = [make_micro_batch(slices, CPU, share) for share in shares]
        assert torch.equal(torch.cat([batch.rows.tokens_T for batch in own]), whole.rows.tokens_T)
        assert torch.equal(torch.cat([batch.rows.positions_T for batch in own]), whole.rows.positions_T)
        starts = [share.of(whole.rows.segments.num_rows).start for share in shares]
        parts = [sources_of(batch, start) for batch, start in zip(own, starts, strict=True)]
        assert sum(map(len, parts)) == whole.labels.num_labels
        assert {place: source for part in parts for place, source in part.items()} == sources_of(whole)
        assert set[int]().union(*map(judged_places, own)) == judged_places(whole)
        for batch in own:
            assert batch.rows.segments == whole.rows.segments and len(batch.labels.logit_rows_R) > 0
            assert torch.equal(batch.labels.lengths_G, whole.labels.lengths_G)


@pytest.mark.parametrize("make", MAKERS)
def test_one_of_the_ranks_that_share_rows_has_the_prompts_last_row_for_both_stages(
    make: Make, rng: random.Random
) -> None:
    for _ in range(20):
        part, ways = slices_of([make(rng.randrange(3), rng)])[-1], rng.randint(2, 4)
        shares = [RowShare(ways, rank, ways) for rank in range(ways)]
        whole, num_prompt = make_micro_group(part, CPU, RowShare(ways)), len(part.prompt)
        found: dict[int, tuple[int, int]] = {}
        for share in shares:
            row, has_last = last_prompt_row(num_prompt, share)
            prompt, batch = make_prompt_rows(part, CPU, share), make_micro_group(part, CPU, share)
            if has_last:
                assert prompt.tokens_T[row] == part.prompt[-1] and prompt.positions_T[row] == num_prompt - 1
            # Row 0 is the prompt's on the rank that has it; the rows after it are numbered from the rank's first one.
            start = share.of(whole.rows.segments.num_rows).start
            for place, (label, at) in sources_of(batch).items():
                assert at or has_last, "a label of the prompt's row is on another rank"
                assert place not in found
                found[place] = (label, at + start if at else 0)
        assert [last_prompt_row(num_prompt, share)[1] for share in shares].count(True) == 1
        assert found == sources_of(whole)


def test_group_with_an_empty_response_is_our_own_mistake() -> None:
    group = make_group(4, [make_response((20,))], prompt=(10,))
    empty = replace(group.responses[0], token_ids=())
    group = replace(group, responses=(*group.responses, empty), rewards=(0.0, 0.0), rollouts=())
    with pytest.raises(AssertionError, match="response 1 of group 4 has no tokens"):
        make_micro_batch(slices_of([group]), CPU)


@pytest.mark.parametrize("observed", [((2, 3),), ((0, 3),), ((0, 1), (1, 2)), ((1, 2), (0, 1)), ((1, 1),), ((-1, 1),)])
def test_a_response_that_does_not_end_with_a_sampled_token_after_ascending_ranges_is_our_own_mistake(
    observed: tuple[tuple[int, int], ...],
) -> None:
    group = make_group(4, [make_response((20, 21, 22))], prompt=(10,))
    whole = slices_of([replace(group, responses=(replace(group.responses[0], observed=observed),))])
    for lay_out in (lambda: make_micro_batch(whole, CPU), lambda: make_micro_group(whole[0], CPU)):
        with pytest.raises(AssertionError, match="response 0 of group 4 has 3 tokens and observed ranges"):
            lay_out()


def test_observed_tokens_are_fed_without_labels_and_their_rows_have_no_logits() -> None:
    batch = make_micro_batch(slices_of([one_of_each_kind()]), CPU)
    # The group's prompt with its three responses, then the prompt of a branch with its response.
    assert batch.rows.tokens_T.tolist() == [10, 11, 12, 13, 14, *(20, 21, 30, 31), *(20, 30, 22), 50, *(60, 61)]
    assert batch.rows.positions_T.tolist() == [0, 1, 0, 1, 2, *(2, 3, 4, 5), *(2, 3, 4), 2, *(3, 4)]
    assert batch.labels.labels_N.tolist() == [20, 21, 40, 23, 50, 51, 61, 62]
    assert batch.labels.lengths_G.tolist() == [3, 1, 2, 2]
    assert batch.labels.rollout_lengths_G.tolist() == [6, 6, 2, 6]
    assert batch.labels.logit_rows_R.tolist() == [1, 5, 8, 11, 12, 13, 14]
    assert batch.labels.label_rows_N.tolist() == [0, 1, 2, 3, 0, 4, 5, 6]
    assert [part.num_rollouts for part in batch.slices] == [2, 0]


def test_a_prompt_whose_last_row_no_response_labels_has_no_logits() -> None:
    group = make_group(4, [make_response((20, 21, 22))], prompt=(10, 11))
    group = replace(group, responses=(replace(group.responses[0], observed=((0, 1),)),))
    (whole,) = slices_of([group])
    for batch, rows in ((make_micro_batch([whole], CPU), [2, 3]), (make_micro_group(whole, CPU), [1, 2])):
        assert batch.labels.logit_rows_R.tolist() == rows
        assert batch.labels.label_rows_N.tolist() == [0, 1]


def test_single_turn_groups_are_laid_out_as_the_formula_without_observed_tokens_says(rng: random.Random) -> None:
    for _ in range(20):
        slices = slices_of([ragged_group(i, rng) for i in range(rng.randint(1, 5))])
        labels = make_micro_batch(slices, CPU).labels
        ordered = sorted(slices, key=lambda part: not part.fed_lens)
        prompt_ends = dict(zip(map(id, ordered), accumulate(len(part.prompt) for part in ordered), strict=True))
        starts = accumulate((sum(part.fed_lens) for part in ordered), initial=max(prompt_ends.values()))
        first_rows = dict(zip(map(id, ordered), starts, strict=False))
        logit_rows: list[int] = []
        label_rows: list[int] = []
        for part in slices:
            prompt_row, next_row = len(logit_rows), len(logit_rows) + 1
            first_row = first_rows[id(part)]
            logit_rows += [prompt_ends[id(part)] - 1, *range(first_row, first_row + sum(part.fed_lens))]
            for response in part.responses:
                fed = len(response.token_ids) - 1
                label_rows += [prompt_row, *range(next_row, next_row + fed)]
                next_row += fed
        responses = [response for part in slices for response in part.responses]
        assert labels.logit_rows_R.tolist() == logit_rows and labels.label_rows_N.tolist() == label_rows
        assert labels.labels_N.tolist() == [token for response in responses for token in response.token_ids]
        lengths = [len(response.token_ids) for response in responses]
        assert labels.lengths_G.tolist() == labels.rollout_lengths_G.tolist() == lengths
