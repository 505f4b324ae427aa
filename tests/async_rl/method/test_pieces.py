"""A group in pieces is the group: what an algorithm, the proof and the records know of it does not change."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import pytest

from async_rl.errors import OnPolicyViolation
from async_rl.method.algorithms import Rollouts
from async_rl.method.group_codec import pack, unpack
from async_rl.method.group_proof import GroupProof, join_pieces
from async_rl.method.ledger import Ledger
from async_rl.method.pieces import counts_group, cut, may_be_cut
from async_rl.method.proof.gap_limits import NoiseLimits
from async_rl.method.proof.logprob_gaps import LogprobGaps
from async_rl.method.token_arrays import ExpertIds
from async_rl.method.types import Batch, Group, Publication, RolloutFacts, WeightSpan
from async_rl.records.samples import Sampled, shown_responses
from tests.support.groups import make_group, make_response, random_group

SIZE = 6


@pytest.fixture
def group() -> Group:
    """Rollouts of one and of several turns, some of them cut at a limit, of two instances, with parts of the reward."""
    rng = random.Random()
    plain = random_group(
        3, 4, [rng.randrange(2, 9) for _ in range(SIZE)], rng, rewards=[rng.random() for _ in "123456"]
    )
    responses = [
        replace(response, instance=rng.choice(("http://a", "http://b")), num_continued=rng.randrange(2))
        for response in plain.responses
    ]
    responses[2] = make_response((7, 8, 9, 10), observed=((1, 3),))
    facts = [
        RolloutFacts(num_turns=rng.randrange(1, 3), status=rng.choice(("completed", "truncated"))) for _ in "123456"
    ]
    parts = (("a", tuple(rng.random() for _ in facts)), ("b", tuple(rng.random() for _ in facts)))
    return replace(plain, responses=tuple(responses), rollouts=tuple(facts), reward_parts=parts)


def pieces_of(group: Group, rng: random.Random) -> Iterator[Group]:
    while len(group.rollouts) > 1 and rng.random() < 0.8:
        first, group = cut(group, rng.randrange(1, len(group.rollouts)))
        yield first
    yield group


def row_of(group: Group) -> GroupProof:
    """With gaps that count tokens, so that sums show what was added."""
    gaps: dict[str, list[LogprobGaps]] = {}
    for response in group.responses:
        gaps.setdefault(response.instance, []).append(LogprobGaps(count=response.num_sampled, squares=0.25))
    shown = tuple((float(len(group.responses[i].token_ids)),) for i in shown_responses(group))
    total = {instance: LogprobGaps.total(own) for instance, own in sorted(gaps.items())}
    return GroupProof.of(group, total, num_corrected=len(group.rollouts), shown_logprobs=shown)


def test_the_rows_of_pieces_in_any_order_are_the_row_of_the_group(group: Group) -> None:
    rng, other = random.Random(), row_of(make_group(1))
    for _ in range(20):
        pieces = list(pieces_of(group, rng))
        rows = [other, *(GroupProof.from_json(asdict(row_of(piece))) for piece in pieces)]
        rng.shuffle(rows)
        joined = sorted(join_pieces(rows), key=lambda row: row.index)
        assert joined == [other, replace(row_of(group), num_pieces=len(pieces))]


def test_an_algorithm_sees_the_whole_group_in_each_piece_and_counts_it_once(group: Group) -> None:
    pieces = list(pieces_of(group, random.Random()))
    assert all(Rollouts.of(piece) == Rollouts.of(group) for piece in pieces)
    assert [counts_group(piece) for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    rewards = [reward for piece in pieces for reward in piece.rewards]
    assert rewards == list(group.rewards) and all(piece.key[0] == 3 for piece in pieces)


def test_pieces_travel_as_they_are(group: Group) -> None:
    pieces = list(pieces_of(group, random.Random()))
    headers, *arrays = pack(pieces)
    assert unpack(headers, *arrays) == [
        replace(
            piece,
            prompt=replace(piece.prompt, row={}),
            responses=tuple(replace(response, text="") for response in piece.responses),
        )
        for piece in pieces
    ]


def test_each_piece_has_the_routes_of_the_prompt() -> None:
    routes = ExpertIds([1, 2])
    group = make_group(responses=[make_response(), make_response((8, 9)), make_response((1, 2))])
    first, *others = group.responses
    group = replace(group, responses=(replace(first, prompt_routes=routes), *others))
    pieces = [*cut(cut(group, 2)[0], 1), cut(group, 2)[1]]
    assert [piece.responses[0].prompt_routes for piece in pieces] == [routes] * 3


def test_groups_with_branches_after_other_prompts_and_single_rollouts_stay_whole() -> None:
    branch = make_response((7, 8), prompt_ids=(3, 4, 5))
    rollouts = (RolloutFacts(num_responses=2), RolloutFacts())
    assert not may_be_cut(make_group(responses=[make_response(), branch, make_response()], rollouts=rollouts))
    assert not may_be_cut(make_group(responses=[branch, branch]))
    assert not may_be_cut(make_group())
    twice = make_group(responses=[make_response(), make_response((8,)), make_response((9,))], rollouts=rollouts)
    assert may_be_cut(twice)
    first, rest = cut(twice, 1)
    assert (len(first.responses), len(rest.responses)) == (2, 1) and (first.rollouts, rest.rollouts) == (
        rollouts[:1],
        rollouts[1:],
    )


def test_samples_have_log_probs_only_where_all_pieces_have_kept_theirs() -> None:
    group = random_group(0, 3, (4, 5, 6))
    first, rest = cut(group, 1)
    rows = [row_of(first), row_of(rest)]
    assert [len(row.shown_logprobs) for row in rows] == [1, 1]
    for lost in (None, 0, 1):
        own = [replace(row, shown_logprobs=()) if i == lost else row for i, row in enumerate(rows)]
        sampled = Sampled()
        sampled.offer([group])
        (shown,) = sampled.rows(lambda ids: "x" * len(ids), join_pieces(own))
        assert ["trainer_logprobs" in response for response in shown["responses"]] == [lost is None] * 2


def _proved(group: Group, rows: Sequence[GroupProof]) -> None:
    ledger = Ledger(None, responses_per_prompt=len(group.rollouts), limits=NoiseLimits(float("inf")))
    publication = Publication("v0", "", (), 0, 0.0)
    ledger.require_on_policy(Batch(0, {group.index: group.prompt}), publication, join_pieces(rows))


def test_the_ledger_takes_a_group_in_pieces_and_nothing_less_or_more() -> None:
    group = random_group(2, 3, (4, 5, 6, 7))
    first, rest = cut(group, 1)
    middle, last = cut(rest, 2)
    rows = [row_of(piece) for piece in (first, middle, last)]
    _proved(group, rows)
    _proved(group, [row_of(first), row_of(rest)])
    with pytest.raises(OnPolicyViolation, match=r"group 2 .*has 3 responses, expected 4"):
        _proved(group, rows[:2])
    for some in (rows[1:], [rows[0], rows[2]], [*rows, rows[1]], [row_of(first), rows[1], row_of(rest)]):
        with pytest.raises(OnPolicyViolation, match=r"group 2 .*in pieces that do not make it up: rollouts"):
            _proved(group, some)
    with pytest.raises(OnPolicyViolation, match="trained 2 times"):
        _proved(group, [*rows, row_of(group)])
    stale = make_response((5, 6, 7, 8, 9), weight_spans=(WeightSpan("v9", 0, 5),))
    with pytest.raises(OnPolicyViolation, match="v9"):
        _proved(group, [rows[0], row_of(replace(rest, responses=(stale, *rest.responses[1:])))])
