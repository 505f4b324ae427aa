"""What log-prob gaps prove: how often sound engines are accused, and which stale ones are found, by simulation."""

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from async_rl.config.train_section import TrainSection
from async_rl.method.proof.gap_limits import MIN_TOKENS, NoiseLimits, Unit, noise_limits, noise_scale, rank_sigmas
from async_rl.method.proof.logprob_gaps import MIXED, LogprobGaps
from tests.support.fresh_seed import fresh_seed
from trainer.logprob_gaps import sums_of

BF16 = NoiseLimits(noise_scale("bfloat16"))
NUM_BATCHES = 2000
NUM_INSTANCES, GROUPS_EACH, TOKENS_EACH = 4, 12, 400


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(fresh_seed())


def honest(num_tokens: int, rms: float, generator: torch.Generator) -> torch.Tensor:
    """As real noise: none on tokens that are nearly certain, heavy tails, shared by neighbours, more in hard groups."""
    own = torch.randn(num_tokens, dtype=torch.float64, generator=generator)
    shared = torch.randn(num_tokens // 8 + 1, dtype=torch.float64, generator=generator).repeat_interleave(8)[
        :num_tokens
    ]
    size = torch.randn(num_tokens, dtype=torch.float64, generator=generator).exp()  # log-normal: a kurtosis of 160
    certain = torch.rand(num_tokens, generator=generator) < 0.5
    gaps = (0.8 * own + 0.6 * shared) * size * ~certain
    difficulty = float(torch.randn(1, generator=generator).mul(0.25).exp())
    # E[size^2] is e^2; half of the tokens count; E[difficulty^2] is e^(2 x 0.25^2).
    return gaps * difficulty * rms / math.sqrt(math.exp(2) / 2 * math.exp(0.125))


def units(rms: Callable[[int], float], generator: torch.Generator, stale: float = 0.0) -> list[Unit]:
    """A batch of groups at four instances; instance 0 answers with weights that move log-probs by an RMS of `stale`."""
    made = []
    for i in range(NUM_INSTANCES):
        for _ in range(GROUPS_EACH):
            gaps = honest(TOKENS_EACH, rms(i), generator)
            if i == 0:
                gaps = gaps + stale * torch.randn(TOKENS_EACH, dtype=torch.float64, generator=generator)
            made.append(Unit(f"http://{i}", sums_of(gaps, BF16.clip)))
    return made


def accusations(batch: list[Unit]) -> list[str]:
    found = BF16.excesses("the batch", LogprobGaps.total(unit.gaps for unit in batch))
    for i in range(NUM_INSTANCES):
        found += BF16.excesses(f"http://{i}", LogprobGaps.total(u.gaps for u in batch if u.instance == f"http://{i}"))
    return found + BF16.outliers(batch)


@pytest.mark.computes
def test_a_sound_bf16_pool_is_not_accused_in_thousands_of_batches(generator: torch.Generator) -> None:
    # All the noise that rounding explains. Batches draw from some thousand groups, shared out at random.
    pool = [sums_of(honest(TOKENS_EACH, BF16.noise, generator), BF16.clip) for _ in range(4000)]
    pool = [replace(gaps, bins=()) for gaps in pool]
    rng = random.Random(torch.randint(2**31, (), generator=generator).item())
    for _ in range(NUM_BATCHES):
        drawn = rng.choices(pool, k=NUM_INSTANCES * GROUPS_EACH)
        assert not accusations([Unit(f"http://{i % NUM_INSTANCES}", gaps) for i, gaps in enumerate(drawn)])


@pytest.mark.nightly
def test_instances_of_two_kinds_are_not_accused_for_their_kinds_noise(generator: torch.Generator) -> None:
    for _ in range(NUM_BATCHES // 10):
        assert not accusations(units(lambda i: BF16.noise / (1.5 if i % 2 else 1.0), generator))


@pytest.mark.parametrize("tokens", [MIN_TOKENS, 4_000, 100_000])
def test_one_token_of_many_nats_ends_no_run(tokens: int, generator: torch.Generator) -> None:
    gaps = honest(tokens, BF16.noise / 2, generator)
    gaps[7] = -40.0
    assert not BF16.excesses("the batch", sums_of(gaps, BF16.clip))


def test_a_stale_instance_is_the_one_that_is_named(generator: torch.Generator) -> None:
    for _ in range(50):
        batch = units(lambda i: BF16.noise / 2, generator, stale=2 * BF16.noise)
        (found,) = BF16.outliers(batch)
        assert found.startswith("instance http://0 deviates from its peers")


def test_what_is_smaller_than_noise_is_not_found_and_not_claimed(generator: torch.Generator) -> None:
    for _ in range(50):
        assert not accusations(units(lambda i: BF16.noise / 2, generator, stale=BF16.noise / 4))


@pytest.mark.parametrize("tokens", [MIN_TOKENS, 10_000, 1_000_000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_the_limit_states_is_found_for_every_number_of_tokens(
    dtype: str, tokens: int, generator: torch.Generator
) -> None:
    limits = NoiseLimits(noise_scale(dtype))
    stale = 1.2 * limits.largest_rms(tokens) * torch.randn(tokens, dtype=torch.float64, generator=generator)
    assert limits.excesses("the batch", sums_of(stale, limits.clip))
    assert limits.largest_rms(tokens) <= 2.7 * 2 * limits.noise


def test_a_truncated_distribution_shows_in_the_mean(generator: torch.Generator) -> None:
    """An engine that samples from the likeliest tokens only reports log-probs that are too large, all of them."""
    gaps = honest(100_000, BF16.noise / 4, generator) + math.log(0.97)
    (found,) = BF16.excesses("the batch", sums_of(gaps, BF16.clip))
    assert "mean -0.03" in found and "RMS" not in found.split("have")[1]


def test_few_tokens_are_not_judged(generator: torch.Generator) -> None:
    assert not BF16.excesses("the batch", sums_of(torch.full((8,), 3.0, dtype=torch.float64), BF16.clip))
    # Complete separation of 2 groups from 2 happens once in six by chance.
    batch = [Unit(f"http://{i}", sums_of(honest(400, (1 + 9 * i) * 0.02, generator), BF16.clip)) for i in (0, 0, 1, 1)]
    assert not BF16.outliers(batch)


def test_one_instance_has_no_peers_and_mixed_responses_accuse_nobody(generator: torch.Generator) -> None:
    loud = [Unit("http://0", sums_of(honest(400, 0.1, generator), BF16.clip)) for _ in range(20)]
    assert not BF16.outliers(loud)
    quiet = [Unit(MIXED, sums_of(honest(400, 0.001, generator), BF16.clip)) for _ in range(20)]
    assert not BF16.outliers([*loud, *quiet])


def test_rank_sigmas_are_those_of_the_definition(generator: torch.Generator) -> None:
    own, others = torch.randn(9, generator=generator).tolist(), torch.randn(14, generator=generator).tolist()
    wins = sum((a > b) + 0.5 * (a == b) for a in own for b in others)
    assert rank_sigmas(own, others) == pytest.approx((wins - 63) / math.sqrt(9 * 14 * 24 / 12))
    assert rank_sigmas([1.0] * 5, [1.0] * 7) == 0.0
    assert rank_sigmas([2.0] * 5, [1.0] * 7) > 3


def test_the_noise_follows_from_the_dtype_unless_it_is_set() -> None:
    assert noise_limits(TrainSection(iterations=1), "bfloat16").noise == 0.0625
    assert noise_limits(TrainSection(iterations=1), "float32").noise == pytest.approx(1.22e-4, rel=1e-2)
    assert noise_limits(TrainSection(iterations=1, logprob_noise=0.5), "float32").noise == 0.5


def test_in_exact_mode_the_smallest_difference_of_one_token_is_a_violation() -> None:
    limits = noise_limits(TrainSection(iterations=1, exact=True), "float32")
    gaps = torch.zeros(MIN_TOKENS - 1, dtype=torch.float64)
    assert limits.excesses("all", sums_of(gaps, limits.clip)) == []
    gaps[7] = -(2.0**-24)
    (message,) = limits.excesses("all", sums_of(gaps, limits.clip))
    assert "differ by up to 5.96e-08 nats among 255 tokens" in message and "--exact" in message
    assert NoiseLimits(limits.noise).excesses("all", sums_of(gaps, limits.clip)) == []
