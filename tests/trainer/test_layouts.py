"""Every layout that is accepted, in real processes over gloo, trains what one rank trains; every other one is refused.

A cover of each kind and value of two ranks runs by default, one of all pairs and that of bfloat16 every night
(`layout_matrix.py`), the whole of it with `make test-layouts`.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from async_rl.checks.preflight.layout import require_layout
from async_rl.config.trainer_section import TrainerSection
from async_rl.errors import ConfigError
from async_rl.method.types import Group
from async_rl.shared.model_families import TABLE
from async_rl.shared.model_limits import FAMILIES
from async_rl.shared.model_parts import Experts
from async_rl.shared.model_shape import ModelShape
from tests.support.fresh_seed import fresh_seed
from tests.support.tiers import by_day
from tests.support.trainer.bf16_bound import bound, roundings
from tests.support.trainer.layout_comparison import OneRank, compare, shares_of_bound
from tests.support.trainer.layout_matrix import (
    ACCEPTED,
    LARGER,
    OTHER_NORMS,
    SPLIT_TOKENS,
    Case,
    Placement,
    accepted_placements,
    cases,
    cover_of,
    cover_of_each,
    drawn,
    expert_family_cases,
    in_bfloat16,
    placements,
    ragged_cases,
    with_frozen_models,
)
from tests.trainer.conftest import draw_ragged_groups
from trainer.batching.group_slice import slices_of, split_slice
from trainer.parallel import Parallel

REFUSALS = {
    "ranks": r"(\d+) training ranks .* cannot form replicas of .*: start a multiple of it",
    "ranks of a stage": r"trainer\.expert_parallel = \d+ does not divide the \d+ ranks of a pipeline stage",
    "one stage": r"trainer\.virtual_pipeline_parallel is 2, but trainer\.pipeline_parallel is 1",
    "no experts": r"trainer\.expert_parallel is \d+, but the model has no experts: leave it at 1",
}


def sizes_that_divide(experts: bool) -> ModelShape:
    """A model that any number of ranks up to 16 divides, so that only combinations are judged."""
    size = 720_720
    return ModelShape(
        family="qwen3_moe" if experts else "qwen3",
        num_layers=size,
        hidden_size=size,
        ffn_size=size,
        num_heads=size,
        num_kv_heads=size,
        head_dim=1,
        vocab_size=size,
        norm_eps=1e-6,
        rope_theta=1e6,
        rope=None,
        tied=False,
        experts=Experts(num_experts=size, top_k=1, ffn_size=size, renormalized=True) if experts else None,
    )


def refusal(placement: Placement, experts: bool) -> str | None:
    """Which of the refusals a placement meets, if any."""
    try:
        require_layout(TrainerSection(**placement.keys), sizes_that_divide(experts), placement.num_ranks)
    except ConfigError as error:
        (rule,) = (name for name, pattern in REFUSALS.items() if re.match(pattern, str(error)))
        return rule
    return None


@pytest.mark.parametrize("num_ranks", sorted(ACCEPTED))
def test_placements_of_few_ranks_are_accepted_or_refused_as_listed(num_ranks: int) -> None:
    for experts in (False, True):
        verdicts = {placement: refusal(placement, experts) for placement in placements(num_ranks)}
        accepted = [placement for placement, verdict in verdicts.items() if verdict is None]
        assert accepted == accepted_placements(num_ranks, experts)
        print(num_ranks, "ranks,", "experts:" if experts else "dense:", Counter(verdicts.values()))
        if num_ranks == 4:
            assert set(verdicts.values()) == set(REFUSALS) - {"routing twice" if not experts else "no experts"} | {None}


def test_no_kind_of_placement_is_accepted_that_the_matrix_does_not_compare() -> None:
    compared = {case.kind for num_ranks in (*ACCEPTED, *LARGER) for case in cases(num_ranks)}
    accepted = {
        Case(placement, experts, True, False, "none", False).kind
        for num_ranks, experts in product(range(1, 17), (False, True))
        for placement in placements(num_ranks)
        if num_ranks % placement.ranks_per_replica == 0 and refusal(placement, experts) is None
    }
    assert accepted == compared


@pytest.fixture(scope="session")
def cover() -> list[Case]:
    """Some seconds of work, so once."""
    return cover_of(with_frozen_models([*cases(2), *cases(4)]))


@pytest.mark.nightly
def test_pairwise_cover_holds_every_kind_and_pair_of_the_matrix(cover: list[Case]) -> None:
    candidates = with_frozen_models([*cases(2), *cases(4)])
    assert {case.kind for case in cover} == {case.kind for case in candidates}
    assert pairs(cover) == pairs(candidates)
    assert len(cover) < len(candidates) / 100


def pairs(some: Iterable[Case]) -> set[Any]:
    return {pair for case in some for pair in combinations(sorted(case.factors.items()), 2)}


@pytest.fixture(scope="session")
def one_rank(tiny_model: Callable[..., Path], parallel: Parallel, ragged_groups: list[Group]) -> OneRank:
    for with_prompt in (True, False):
        num_parts = [
            len(split_slice(whole, SPLIT_TOKENS, with_prompt=with_prompt)) for whole in slices_of(ragged_groups)
        ]
        assert max(num_parts) > 1, "no group is split"
    return OneRank(tiny_model, parallel, ragged_groups)


@pytest.mark.distributed
@pytest.mark.timeout(650)
def test_every_kind_and_setting_of_two_ranks_trains_what_one_rank_trains(one_rank: OneRank, tmp_path: Path) -> None:
    compare(cover_of(with_frozen_models(cases(2)), strength=1), one_rank, tmp_path, timeout_s=300)


@pytest.mark.distributed
@pytest.mark.timeout(650)
@pytest.mark.parametrize("num_ranks", [2, *(pytest.param(n, marks=pytest.mark.nightly) for n in (3, 4))])
def test_ranks_that_share_key_heads_and_unequal_stages_train_what_one_rank_trains(
    num_ranks: int, one_rank: OneRank, tmp_path: Path
) -> None:
    compare(cover_of(ragged_cases(num_ranks), strength=1), one_rank, tmp_path, timeout_s=600)


@pytest.mark.distributed
@pytest.mark.timeout(650)
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_latents_delta_nets_sinks_and_other_experts_train_what_one_rank_trains(
    num_ranks: int, one_rank: OneRank, tmp_path: Path
) -> None:
    """Among them the gradient of the rotated part of the key, which all ranks' heads share; of two ranks half of it."""
    cover = cover_of(expert_family_cases(num_ranks), strength=1)
    compare(drawn(cover, len(cover) // 2) if num_ranks == 2 else cover, one_rank, tmp_path, timeout_s=600)


@pytest.mark.distributed
@pytest.mark.timeout(650)
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_norms_of_several_ranks_heads_and_of_outputs_train_what_one_rank_trains(
    num_ranks: int, one_rank: OneRank, tmp_path: Path
) -> None:
    """With two ranks by tensor parallelism, which divides the norms; with four in half of a cover of each placement."""
    chosen = cover_of_each(OTHER_NORMS, num_ranks)
    divided = [case for case in chosen if case.placement.tensor > 1]
    compare(divided if num_ranks == 2 else drawn(chosen, len(chosen) // 2), one_rank, tmp_path, timeout_s=600)


@pytest.mark.distributed
@pytest.mark.timeout(650)
@pytest.mark.parametrize(
    ("num_ranks", "of_families"),
    [(2, False), *(pytest.param(n, True, marks=pytest.mark.nightly) for n in (2, 4))],
)
def test_pieces_of_long_groups_on_several_replicas_train_what_one_rank_trains(
    num_ranks: int, of_families: bool, one_rank: OneRank, tmp_path: Path
) -> None:
    candidates = [*with_frozen_models(cases(num_ranks)), *(expert_family_cases(num_ranks) if of_families else ())]
    some = [case for case in candidates if case.split and case.placement.num_replicas > 1]
    compare(cover_of(some, strength=1), one_rank, tmp_path, timeout_s=600)


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.timeout(1250)
def test_a_pairwise_cover_of_the_matrix_trains_what_one_rank_trains(
    cover: list[Case], one_rank: OneRank, tmp_path: Path
) -> None:
    compare(cover, one_rank, tmp_path, timeout_s=600)


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.timeout(1250)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_share_rows_train_what_one_rank_trains(num_ranks: int, one_rank: OneRank, tmp_path: Path) -> None:
    """With two ranks in every pair of settings, with four in every setting."""
    candidates = (with_frozen_models(cases(num_ranks)), ragged_cases(num_ranks), expert_family_cases(num_ranks))
    shared = [[case for case in some if case.placement.context > 1] for some in candidates]
    strength = {2: 2, 4: 1}[num_ranks]
    compare({case for some in shared for case in cover_of(some, strength)}, one_rank, tmp_path, timeout_s=1200)


@pytest.mark.parametrize("family", by_day(FAMILIES, ("qwen3", "qwen3_moe")))
def test_bfloat16_of_every_family_stays_within_the_derived_bound(family: str, one_rank: OneRank) -> None:
    """A gated delta net subtracts what it knows of a value, and normalizes what is left: where that is little, errors
    are larger than values are. Of 15 draws one was above the bound, 12 below half of it: here it is the median of five.
    """
    experts, rng = TABLE[family].experts is not None, random.Random(fresh_seed())
    case = Case(Placement(1, 1, 1, 1, 1), experts, False, False, "none", dtype="bfloat16", family=family)
    draws = [draw_ragged_groups(rng) for _ in range(5)] if TABLE[family].delta else [one_rank.groups]
    shares = []
    for groups in draws:
        on_one = replace(one_rank, groups=groups, sampled={}, trained={})
        trained = on_one.train(on_one.job(case))
        shares += shares_of_bound(case, trained.path[-1], on_one.expected(case).path).values()
    print(f"{family}: {', '.join(f'{share:.2f}' for share in shares)} of the bound")
    assert median(shares) <= 1


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.timeout(1250)
def test_bfloat16_on_two_ranks_stays_within_the_derived_bound(one_rank: OneRank, tmp_path: Path) -> None:
    compare(cover_of(in_bfloat16(cases(2))), one_rank, tmp_path, timeout_s=600)


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_the_bound_of_bfloat16_finds_a_lost_half_of_the_gradients(experts: bool, one_rank: OneRank) -> None:
    gradient, nothing = torch.ones(4), torch.zeros(4)
    # Two equal steps to a weight of 0, whose export needs no rounding: half of the way is one gradient.
    assert bound(roundings(2, experts), [-2 * gradient, -gradient, nothing]) < float(gradient.norm())
    case = next(case for case in in_bfloat16(cases(2)) if case.experts == experts)
    path = one_rank.expected(case).path
    half_way = {name: (start + path[-1][name]) / 2 for name, start in path[0].items()}
    (share,) = shares_of_bound(case, half_way, path).values()
    assert share > 1


@pytest.mark.layouts
@pytest.mark.distributed
@pytest.mark.timeout(3600)
def test_bfloat16_with_more_ranks_stays_within_the_derived_bound(one_rank: OneRank, tmp_path: Path) -> None:
    compare(cover_of(in_bfloat16(cases(4))), one_rank, tmp_path, timeout_s=3500)


@pytest.mark.layouts
@pytest.mark.distributed
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("num_ranks", sorted(ACCEPTED))
def test_the_whole_matrix_trains_what_one_rank_trains(
    num_ranks: int, experts: bool, tied: bool, one_rank: OneRank, tmp_path: Path
) -> None:
    chosen = [case for case in cases(num_ranks) if (case.experts, case.tied) == (experts, tied)]
    compare(chosen, one_rank, tmp_path, timeout_s=3500)


@pytest.mark.layouts
@pytest.mark.distributed
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_ranks", sorted(LARGER))
def test_kinds_of_placements_that_need_more_ranks_train_what_one_rank_trains(
    num_ranks: int, one_rank: OneRank, tmp_path: Path
) -> None:
    compare(cover_of(cases(num_ranks)), one_rank, tmp_path, timeout_s=3600)
