"""Every shipped algorithm passes the check that users have for theirs, with every option; wrong ones do not."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.algorithm_traits import TRAITS
from async_rl.method.algorithms import (
    ALGORITHMS,
    Algorithm,
    LossSum,
    PolicyGradient,
    Responses,
    Rollouts,
    Tokens,
    Totals,
)
from async_rl.method.algorithms.checking import check_algorithm
from tests.support.algorithm_options import PARTS, random_settings
from tests.support.algorithms import MAX_RESPONSE_TOKENS, algorithm_of, rollouts_of

NUM_SETTINGS = 2
"""For each algorithm, in every run of the test."""


def check(algorithm: Algorithm, num_batches: int = 2, **options: Any) -> None:
    check_algorithm(algorithm, max_response_tokens=MAX_RESPONSE_TOKENS, num_batches=num_batches, **options)


@pytest.mark.computes
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_shipped_algorithm_streams(name: str, rng: random.Random) -> None:
    for _ in range(NUM_SETTINGS):
        settings = random_settings(name, rng)
        print(settings)
        check(algorithm_of(**settings), num_batches=1, parts=PARTS if name == "gdpo" else ())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_is_what_its_traits_say(name: str) -> None:
    cls, traits, rng = ALGORITHMS[name], TRAITS[name], random.Random(0)
    assert (cls.Options, cls.UNUSED) == (traits.options, traits.unused)
    assert (cls.SCALES_BY_STD == "batch") == traits.scaled_by_batch
    for _ in range(200):
        section = AlgorithmSection.model_validate(random_settings(name, rng))
        needs = cls(section, MAX_RESPONSE_TOKENS).needs
        assert needs.totals == section.waits_for_batch and needs.whole_groups == traits.whole_groups
        assert needs.values == traits.values
    made = algorithm_of(name=name, **({"teacher": "t"} if name == "distillation" else {}))
    learns_alone = made.has_gradient(rollouts_of([1.0])) and (made.needs.teacher or made.needs.values)
    assert learns_alone == traits.single_rollouts


class MeanOfMicroBatch(PolicyGradient):
    """Divides by what is in the micro-batch."""

    def loss_sum(self, tokens: Tokens, responses: Responses) -> LossSum:
        return LossSum(super().loss_sum(tokens, responses).loss / max(len(tokens), 1))


class WhitensMicroBatch(PolicyGradient):
    def loss_sum(self, tokens: Tokens, responses: Responses) -> LossSum:
        advantages_G = responses.advantages_G
        if len(advantages_G) > 1:
            advantages_G = advantages_G - advantages_G.mean()
        return super().loss_sum(tokens, replace(responses, advantages_G=advantages_G))


class ComparesGroups(PolicyGradient):
    """Like online DPO, without saying that it needs whole groups."""

    def loss_sum(self, tokens: Tokens, responses: Responses) -> LossSum:
        sums_G = responses.summed(tokens.logprobs_N) * responses.advantages_G
        groups = sums_G.new_zeros(len(sums_G)).index_add(0, responses.groups_G, sums_G)
        return LossSum(groups.square().sum())


class LeavesOutTooMuch(PolicyGradient):
    def has_gradient(self, rollouts: Rollouts) -> bool:
        return max(rollouts.rewards) > 1.5


class DividesByTheMean(PolicyGradient):
    def _advantages(self, rewards_G: torch.Tensor) -> torch.Tensor:
        return rewards_G / rewards_G.mean() ** 4


class NegativeCount(PolicyGradient):
    def denominator(self, totals: Totals) -> float:
        return -super().denominator(totals)


class OtherNames(PolicyGradient):
    def sums(self, rollouts: Rollouts) -> Totals:
        return {**super().sums(rollouts), f"of {len(rollouts.rewards)}": 1.0}


class Remembers(PolicyGradient):
    """A baseline that grows with each group."""

    baseline = 0.0

    def _advantages(self, rewards_G: torch.Tensor) -> torch.Tensor:
        self.baseline += 0.1
        return rewards_G - self.baseline


class InFloat32(PolicyGradient):
    def advantages(self, rollouts: Rollouts, totals: Totals | None) -> torch.Tensor:
        return super().advantages(rollouts, totals).float()


class ChangesItsTokens(PolicyGradient):
    def loss_sum(self, tokens: Tokens, responses: Responses) -> LossSum:
        tokens.old_logprobs_N.clamp_(min=-0.1)
        return super().loss_sum(tokens, responses)


class WithoutGradient(PolicyGradient):
    def loss_sum(self, tokens: Tokens, responses: Responses) -> LossSum:
        return LossSum(super().loss_sum(tokens, responses).loss.detach())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (MeanOfMicroBatch, "in one micro-batch"),
        (WhitensMicroBatch, "in one micro-batch|has_gradient"),
        (ComparesGroups, "in one micro-batch"),
        (LeavesOutTooMuch, "has_gradient of group .* is False, but it has one"),
        (DividesByTheMean, "not finite"),
        (NegativeCount, r"denominator\(\) is -"),
        (OtherNames, "other names in other groups"),
        (Remembers, "in one micro-batch|has_gradient"),
        (InFloat32, "expected float64, one per rollout"),
        (ChangesItsTokens, r"loss_sum\(\) changes the old_logprobs_N that it was given"),
        (WithoutGradient, "the loss is .*: expected a sum with a gradient"),
    ],
)
def test_an_algorithm_that_does_not_stream_is_found_out(wrong: type[PolicyGradient], says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check(wrong(AlgorithmSection(), MAX_RESPONSE_TOKENS))


def test_a_failure_names_the_seed_that_repeats_it() -> None:
    algorithm = MeanOfMicroBatch(AlgorithmSection(), MAX_RESPONSE_TOKENS)
    with pytest.raises(AssertionError, match="with several rewards, seed 7:") as first:
        check(algorithm, seed=7)
    with pytest.raises(AssertionError) as second:
        check(algorithm, seed=7)
    assert str(first.value) == str(second.value)
