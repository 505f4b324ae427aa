"""Which fault is named, on tokens drawn from known distributions: a random output layer over random hidden rows."""

import math
from collections.abc import Callable

import pytest
import torch

from async_rl.method.proof.gap_limits import MIN_TOKENS, NoiseLimits, noise_scale
from tests.support.fresh_seed import fresh_seed
from trainer.verify.diagnosis import Diagnosis, diagnose, fit_temperature

NUM_TOKENS, HIDDEN, VOCABULARY = 1024, 64, 96
FLOAT32, BFLOAT16 = (NoiseLimits(noise_scale(dtype)) for dtype in ("float32", "bfloat16"))

Draw = Callable[..., "Policy"]


class Policy:
    """Implements `Hypotheses`: N rows of logits, and one token drawn from each at temperature `sampled_at`."""

    def __init__(self, num_tokens: int, sampled_at: float) -> None:
        self.rows_NH = torch.randn(num_tokens, HIDDEN, dtype=torch.float64)
        self.head_VH = 2 * torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64) / math.sqrt(HIDDEN)
        self.first_head_VH: torch.Tensor | None = None
        probs_NV = (self.rows_NH @ self.head_VH.T / sampled_at).softmax(-1)
        self.tokens_N1 = probs_NV.multinomial(1)

    def logprobs_at(self, temperature: float) -> torch.Tensor:
        return self.of(self.rows_NH, self.head_VH, temperature)

    def with_first_head(self) -> torch.Tensor | None:
        return None if self.first_head_VH is None else self.of(self.rows_NH, self.first_head_VH)

    def in_other_dtype(self) -> torch.Tensor:
        return self.of(self.rows_NH, rounded(self.head_VH))

    def of(self, rows_NH: torch.Tensor, head_VH: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """Log-probs of the tokens."""
        return (rows_NH @ head_VH.T / temperature).log_softmax(-1).gather(-1, self.tokens_N1)[:, 0]


def rounded(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().double()


@pytest.fixture
def draw() -> Draw:
    fresh_seed()

    def make(num_tokens: int = NUM_TOKENS, sampled_at: float = 1.0) -> Policy:
        return Policy(num_tokens, sampled_at)

    return make


def diagnosed(policy: Policy, reported_N: torch.Tensor, limits: NoiseLimits = FLOAT32, of: float = 1.0) -> Diagnosis:
    return diagnose(reported_N, policy, limits, of, "bfloat16" if limits == BFLOAT16 else "float32")


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_a_sound_instance_has_no_fault_at_any_temperature(draw: Draw, temperature: float) -> None:
    policy = draw(sampled_at=temperature)
    found = diagnosed(policy, policy.logprobs_at(temperature) + 1e-6 * torch.randn(NUM_TOKENS), of=temperature)
    assert found.cause is None and found.is_judged
    assert found.score_sigmas is not None and abs(found.score_sigmas) < 6


@pytest.mark.parametrize("temperature", [0.1, 0.5, 0.9, 0.99, 1.01, 2.0, 8.0])
def test_the_temperature_of_reported_log_probs_is_found(draw: Draw, temperature: float) -> None:
    policy = draw(sampled_at=temperature)
    found = diagnosed(policy, policy.logprobs_at(temperature))
    assert found.cause == "temperature" and not found.is_of_sampling
    assert found.temperature == pytest.approx(temperature, rel=1e-4)


@pytest.mark.parametrize("temperature", [0.5, 1.8])
def test_sampling_at_another_temperature_than_is_reported_is_found_by_the_tokens(
    draw: Draw, temperature: float
) -> None:
    policy = draw(sampled_at=temperature)
    found = diagnosed(policy, policy.logprobs_at(1.0))
    assert found.cause == "temperature" and found.is_of_sampling
    # A standard error of ln T is one over the root of tokens times the variance of a logit, of about 2.
    assert found.temperature is not None and abs(math.log(found.temperature / temperature)) < 0.3


@pytest.mark.parametrize("sureness", [100, 200])
def test_rounding_of_a_policy_that_is_nearly_sure_of_its_tokens_is_no_temperature(draw: Draw, sureness: int) -> None:
    """An instance that rounds otherwise draws many tokens that the trainer does not expect."""
    policy = draw()
    policy.head_VH *= sureness
    rows_NH = policy.rows_NH * (1 + 2**-4 * (torch.rand_like(policy.rows_NH) - 0.5))
    policy.tokens_N1 = (rows_NH @ policy.head_VH.T).softmax(-1).multinomial(1)
    found = diagnosed(policy, policy.of(rows_NH, policy.head_VH), BFLOAT16)
    assert found.cause is None and abs(found.score_sigmas or 0.0) > 3, "the tokens alone look like a temperature"


def test_tokens_that_are_certain_tell_nothing_of_their_temperature(draw: Draw) -> None:
    policy = draw()
    error = diagnosed(policy, policy.logprobs_at(1.0)).log_temperature_error
    # As above: 1,024 tokens whose logits have a variance of about 2.
    assert error is not None and 0.01 < error < 0.05
    policy.head_VH *= 1000
    policy.tokens_N1 = (policy.rows_NH @ policy.head_VH.T).argmax(-1, keepdim=True)
    certain = diagnosed(policy, policy.logprobs_at(1.0))
    assert certain.cause is None and (certain.log_temperature_error is None or certain.log_temperature_error > 0.12)


@pytest.mark.parametrize("sureness", [20.0, 200.0, 1000.0])
def test_rounding_to_bfloat16_of_a_policy_that_is_nearly_sure_of_its_tokens_is_no_other_dtype(
    draw: Draw, sureness: float
) -> None:
    policy = draw()
    policy.rows_NH, policy.head_VH = rounded(policy.rows_NH), rounded(sureness * policy.head_VH)
    logits_NV = rounded(policy.rows_NH @ policy.head_VH.T)
    policy.tokens_N1 = logits_NV.softmax(-1).multinomial(1)
    found = diagnosed(policy, logits_NV.log_softmax(-1).gather(-1, policy.tokens_N1)[:, 0], BFLOAT16)
    assert found.cause is None, found


def test_sampling_the_likeliest_tokens_only_is_found_by_the_tokens(draw: Draw) -> None:
    policy = draw()
    policy.tokens_N1 = (policy.rows_NH @ policy.head_VH.T).argmax(-1, keepdim=True)
    found = diagnosed(policy, policy.logprobs_at(1.0))
    assert found.cause == "temperature" and found.is_of_sampling and "top_p" in found.detail


def test_an_instance_in_bfloat16_is_told_from_one_with_other_weights_of_the_same_error(draw: Draw) -> None:
    policy = draw()
    in_bfloat16 = policy.of(rounded(policy.rows_NH), rounded(policy.head_VH))
    size = float((in_bfloat16 - policy.logprobs_at(1.0)).square().mean().sqrt())
    assert diagnosed(policy, in_bfloat16).cause == "dtype"
    nudged_VH = policy.head_VH * (1 + 2**-9 * torch.randn(policy.head_VH.shape))
    nudged = policy.of(policy.rows_NH, nudged_VH)
    assert 0.2 < float((nudged - policy.logprobs_at(1.0)).square().mean().sqrt()) / size < 5
    assert diagnosed(policy, nudged).cause == "weights"


def test_an_instance_in_float32_beside_a_trainer_in_bfloat16_is_named(draw: Draw) -> None:
    policy = draw()
    exact = policy.logprobs_at(1.0)
    rows_NH, policy.rows_NH = policy.rows_NH, rounded(policy.rows_NH)
    policy.in_other_dtype = lambda: policy.of(rows_NH, policy.head_VH)  # type: ignore[method-assign]
    assert diagnosed(policy, exact, BFLOAT16).cause == "dtype"
    assert diagnosed(policy, policy.of(rounded(rows_NH), rounded(policy.head_VH)), BFLOAT16).cause is None


def test_the_head_of_the_first_publish_is_named(draw: Draw) -> None:
    policy = draw()
    policy.first_head_VH = policy.head_VH + 0.05 * torch.randn(policy.head_VH.shape)
    stale = policy.of(policy.rows_NH, policy.first_head_VH)
    assert diagnosed(policy, stale).cause == "head"
    policy.first_head_VH = None
    assert diagnosed(policy, stale).cause == "weights"


def test_exact_mode_tells_rounding_from_other_weights(draw: Draw) -> None:
    policy, limits = draw(), NoiseLimits(noise_scale("float32"), exact=True)
    assert diagnosed(policy, policy.logprobs_at(1.0), limits).cause is None
    assert diagnosed(policy, policy.logprobs_at(1.0) + 1e-6, limits).cause == "rounding"
    other = policy.of(policy.rows_NH, policy.head_VH + 0.1 * torch.randn(policy.head_VH.shape))
    assert diagnosed(policy, other, limits).cause == "weights"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_log_probs_that_are_no_numbers_are_a_fault_and_end_no_search(draw: Draw, bad: float) -> None:
    policy = draw()
    reported_N = policy.logprobs_at(1.0)
    reported_N[7] = bad
    assert diagnosed(policy, reported_N).cause == "weights"


def test_too_few_tokens_are_not_judged(draw: Draw) -> None:
    policy = draw(MIN_TOKENS - 1)
    found = diagnosed(policy, policy.logprobs_at(3.0))
    assert found.cause is None and not found.is_judged and "256" in found.detail


def test_a_certain_policy_has_no_temperature_and_no_division_by_zero(draw: Draw) -> None:
    policy = draw()
    # So large that no two tokens of any row are as likely.
    policy.head_VH *= 1e12
    policy.tokens_N1 = (policy.rows_NH @ policy.head_VH.T).argmax(-1, keepdim=True)
    found = diagnosed(policy, torch.zeros(NUM_TOKENS, dtype=torch.float64))
    assert found.cause is None and found.score_sigmas == 0.0
    assert fit_temperature(policy.logprobs_at(1.0), policy.logprobs_at, 1.0) > 0
