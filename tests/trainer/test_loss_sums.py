"""Sums of a batch do not depend on how its groups were cut into micro-batches, and are those of every token."""

import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.method.algorithms import PolicyGradient, make_algorithm
from async_rl.method.types import Group
from tests.support.groups import make_group, make_response
from tests.support.trainer.branched_groups import branched_group
from tests.support.trainer.grpo_reference import expected_advantages
from trainer.batching.group_slice import GroupSlice, slices_of, split_slice
from trainer.batching.shared_prompt import make_micro_batch
from trainer.loss_sums import LossSums

CPU = torch.device("cpu")
KL_COEF = 0.1
Tokens = dict[tuple[int, int, int], float]
"""(group, response, token) -> a log-prob."""


@st.composite
def batches(draw: st.DrawFn) -> list[Group]:
    """Groups of several lengths, rewards and samplers."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    made = []
    for index, lens in enumerate(
        draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4))
    ):
        responses = [make_response((7,) * n, logprobs=[rng.uniform(-3, 0) for _ in range(n)]) for n in lens]
        made.append(make_group(index, responses, rewards=[rng.choice((0.0, 0.5, 1.0)) for _ in lens]))
    return made


@st.composite
def branched_batches(draw: st.DrawFn) -> list[Group]:
    """Groups of multi-turn rollouts with branches."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    return [branched_group(index, rng) for index in range(draw(st.integers(1, 3)))]


def keys_of(group: Group, rollout: int) -> list[tuple[int, int, int]]:
    """Those of a rollout's sampled tokens."""
    start = sum(facts.num_responses for facts in group.rollouts[:rollout])
    numbers = range(start, start + group.rollouts[rollout].num_responses)
    return [(group.index, r, t) for r in numbers for t in group.responses[r].sampled]


def random_tokens(groups: Sequence[Group], seed: int) -> Tokens:
    rng = random.Random(seed)
    return {
        (group.index, r, t): rng.uniform(-4, 0)
        for group in groups
        for r, response in enumerate(group.responses)
        for t in response.sampled
    }


def values_of(slices: Sequence[GroupSlice], tokens: Tokens) -> torch.Tensor:
    """In the order of a micro-batch's labels."""
    return torch.tensor(
        [
            tokens[part.group.index, r, t]
            for part in slices
            for r in part.indices
            for t in part.group.responses[r].sampled
        ],
        dtype=torch.float64,
    )


@settings(max_examples=60)
@given(
    batches() | branched_batches(),
    st.sampled_from(["token", "sequence"]),
    st.integers(3, 30),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_sums_are_those_of_every_token_however_groups_were_cut(
    groups: list[Group], normalize: str, max_tokens: int, seed: int, old_model: bool
) -> None:
    algorithm = make_algorithm(AlgorithmSection(kl_coef=KL_COEF, normalize=normalize), 100)
    sums = LossSums(algorithm, "model" if old_model else "reuse", 1.0)
    new, old, ref = (random_tokens(groups, seed + i) for i in range(3))
    sums.begin(groups, {}, None)
    slices = [part for whole in slices_of(groups) for part in split_slice(whole, max_tokens, with_prompt=True)]
    random.Random(seed).shuffle(slices)
    returned = 0.0
    for start in range(0, len(slices), 2):
        some = slices[start : start + 2]
        micro_batch = make_micro_batch(some, CPU)
        ordered = micro_batch.slices
        old_N = values_of(ordered, old) if old_model else None
        logprobs_N = values_of(ordered, new)
        returned += float(sums.add(micro_batch, logprobs_N, -logprobs_N, old_N, values_of(ordered, ref)))
    totals = sums.totals()
    loss, count = independent_loss(groups, normalize, new, old if old_model else new, ref)
    assert returned == pytest.approx(loss, abs=1e-9) and totals["loss"] == pytest.approx(loss, abs=1e-9)
    added = {name.removeprefix("total/"): value for name, value in totals.items() if name.startswith("total/")}
    assert algorithm.denominator(added) == count and totals["tokens"] == len(new)
    assert totals["metric/entropy"] == pytest.approx(-sum(new.values()))
    sampler = old if old_model else new
    for group, row in zip(groups, sums.take_rows(groups), strict=True):
        gaps = [
            sampler[group.index, r, t] - logprob
            for r, response in enumerate(group.responses)
            for t, logprob in zip(response.sampled, response.logprobs, strict=True)
        ]
        assert row.index == group.index
        assert row.all_gaps.count == len(gaps)
        assert row.all_gaps.signed_sum == pytest.approx(sum(gaps), abs=1e-9)
        assert row.all_gaps.largest == pytest.approx(max(map(abs, gaps)))


def independent_loss(
    groups: Sequence[Group], normalize: str, new: Tokens, old: Tokens, ref: Tokens
) -> tuple[float, float]:
    """GRPO token by token, on floats: the clipped objective, and the k3 estimate of the KL."""
    low, high = PolicyGradient.CLIP
    loss = count = 0.0
    for group in groups:
        for rollout, advantage in enumerate(expected_advantages(group)):
            terms = []
            for key in keys_of(group, rollout):
                ratio = math.exp(new[key] - old[key])
                clipped = min(max(ratio, 1 - low), 1 + high)
                gap = ref[key] - new[key]
                terms.append(-min(ratio * advantage, clipped * advantage) + KL_COEF * (math.exp(gap) - gap - 1))
            loss += sum(terms) / (len(terms) if normalize == "sequence" else 1)
            count += 1 if normalize == "sequence" else len(terms)
    return loss, count


def test_nothing_is_left_after_a_step() -> None:
    sums = LossSums(make_algorithm(AlgorithmSection(), 100), "reuse", 1.0)
    sums.note_untrained(2)
    sums.note_untrained(3)
    assert sums.totals() == {"untrained": 5}
    sums.clear()
    assert sums.totals() == {}
