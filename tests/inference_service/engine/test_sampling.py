"""Tokens from logits: noise by (seed, position), parameters per row, log-probs in both modes."""

import math
from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.shared.protocol.inference import SamplingParams
from inference_service.engine.sampling import sample_step, uniforms
from inference_service.engine.sequences import Sequence

LOGITS_V = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def row(seed: int = 0, **params: object) -> Sequence:
    return Sequence((1,), SamplingParams.model_validate(params), seed, frozenset())


def draw(num_draws: int, mode: str = "processed_logprobs", **params: object) -> list[object]:
    rows = [row(seed, **params) for seed in range(num_draws)]
    return list(sample_step(LOGITS_V.expand(num_draws, -1).clone(), rows, mode, "v"))


def test_uniforms_depend_on_seed_and_position_only() -> None:
    together = uniforms([3, 3, 4, -1], [0, 1, 0, 5])
    assert len(set(together)) == 4
    assert [float(uniforms([s], [p])[0]) for s, p in ((3, 0), (3, 1), (4, 0), (-1, 5))] == together.tolist()


def test_uniforms_of_neighbouring_seeds_and_positions_are_even_and_independent() -> None:
    u = torch.tensor(uniforms([s for s in range(200) for _ in range(100)], list(range(100)) * 200)).view(200, 100)
    assert u.min() >= 0.0 and u.max() < 1.0
    assert u.histc(10, 0, 1) / u.numel() == pytest.approx(torch.full((10,), 0.1), abs=0.01)
    centred = u - 0.5
    for shifted in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
        assert abs(float(shifted.mean())) < 4 / 12 / shifted.numel() ** 0.5


def test_noise_follows_the_number_of_tokens_wherever_the_prompt_ends() -> None:
    params = SamplingParams()
    whole = Sequence((1, 2), params, 9, frozenset())
    for _ in range(12):
        (sample,) = sample_step(LOGITS_V[None].clone(), [whole], "processed_logprobs", "v")
        cut = Sequence((*whole.token_ids(),), params, 9, frozenset())
        assert sample_step(LOGITS_V[None].clone(), [cut], "processed_logprobs", "v") == [sample]
        whole.samples.append(sample)
    assert len({sample.token_id for sample in whole.samples}) > 1


@pytest.mark.computes
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_tokens_come_as_often_as_their_probability(temperature: float) -> None:
    counts = Counter(sample.token_id for sample in draw(20_000, temperature=temperature))
    probabilities = (LOGITS_V / temperature).softmax(-1).tolist()
    for token, p in enumerate(probabilities):
        assert counts[token] / 20_000 == pytest.approx(p, abs=4 * (p * (1 - p) / 20_000) ** 0.5 + 1e-9)


@pytest.mark.parametrize(
    ("params", "tokens"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": -1}, {0, 1, 2, 3, 4, 5}),
        ({"top_k": 10**30}, {0, 1, 2, 3, 4, 5}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 1e-9}, {0}),
        ({"top_p": 1e-300}, {0}),
        ({"min_p": 0.2}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.85}, {0, 1}),
        ({"temperature": 0.0, "top_k": 3}, {0}),
        ({"temperature": 1e-6}, {0}),
    ],
    ids=str,
)
def test_truncation_keeps_exactly_these_tokens(params: dict[str, object], tokens: set[int]) -> None:
    samples = draw(5_000, **params)
    assert {sample.token_id for sample in samples} == tokens
    if params.get("temperature", 1.0) == 1.0:
        kept = LOGITS_V[sorted(tokens)].log_softmax(-1)
        for sample in samples[:50]:
            assert sample.logprob == pytest.approx(float(kept[sorted(tokens).index(sample.token_id)]), abs=1e-6)


def plainly_kept(logits: list[float], top_p: float, top_k: int) -> set[int]:
    """The tokens that top_k and then top_p leave in, in exact arithmetic; of equal logits the first id comes first."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[: top_k or None]
    weights = [Fraction(math.exp(logits[token] - logits[order[0]])) for token in order]
    bound, before = Fraction(top_p) * sum(weights), Fraction(0)
    kept = set()
    for token, weight in zip(order, weights, strict=True):
        if top_p < 1.0 and kept and before >= bound:
            break
        kept.add(token)
        before += weight
    return kept


def kept_tokens(logits: list[float], **params: object) -> set[int]:
    """Those with a finite log-prob."""
    (sample,) = sample_step(torch.tensor([logits]), [row(logprobs=len(logits), **params)], "processed_logprobs", "v")
    return {token for token, logprob, _ in sample.top if math.isfinite(logprob)}


@given(
    # Few different values, so that many are equal; also at the bounds of top_k and top_p.
    st.lists(st.sampled_from([-2.0, -1.0, -0.5, 0.0, 0.25, 1.5, 3.0]), min_size=1, max_size=20),
    st.floats(0.01, 1.0),
    st.integers(0, 22),
)
def test_top_p_and_top_k_keep_the_tokens_of_a_plain_reference(logits: list[float], top_p: float, top_k: int) -> None:
    kept = kept_tokens(logits, top_p=top_p, top_k=top_k)
    # Rounding decides where the mass of some tokens is top_p to the last digits.
    assert kept in [plainly_kept(logits, min(top_p * scale, 1.0), top_k) for scale in (1 - 1e-9, 1.0, 1 + 1e-9)]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_p": 0.5}, {0, 1, 2, 3}),
        ({"top_p": 0.51}, {0, 1, 2, 3, 4}),
        ({"top_k": 4, "top_p": 0.5}, {0, 1}),
    ],
    ids=str,
)
def test_of_equally_likely_tokens_those_with_smaller_ids_stay(params: dict[str, object], kept: set[int]) -> None:
    # Eighths are exact in binary.
    assert kept_tokens([0.5] * 8, **params) == kept


def test_what_is_kept_is_sampled_as_often_as_the_reference_says() -> None:
    logits = (LOGITS_V / 0.7).tolist()
    kept = plainly_kept(logits, 0.95, 4)
    counts = Counter(sample.token_id for sample in draw(20_000, temperature=0.7, top_p=0.95, top_k=4))
    assert counts.keys() == kept and len(kept) == 3
    total = sum(math.exp(logits[token]) for token in kept)
    for token in kept:
        p = math.exp(logits[token]) / total
        assert counts[token] / 20_000 == pytest.approx(p, abs=4 * (p * (1 - p) / 20_000) ** 0.5)


def test_a_tail_that_float32_cannot_tell_from_nothing_is_cut_where_top_p_says() -> None:
    # Sixteen tokens with 2^-34 each beside one that has nearly all: the first nine have 7.5 such parts after them.
    logits = [34 * math.log(2.0), *[0.0] * 16]
    assert kept_tokens(logits, top_p=1 - 7.5 * 2**-34) == set(range(10))


def test_raw_logprobs_are_those_of_the_untouched_logits() -> None:
    raw = LOGITS_V.log_softmax(-1)
    for sample in draw(50, "raw_logprobs", temperature=0.5, top_k=3):
        assert sample.logprob == pytest.approx(float(raw[sample.token_id]), abs=1e-6)


def test_rows_of_one_step_keep_their_own_parameters() -> None:
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 0.3, "top_k": 2},
        {"min_p": 0.4},
        {"repetition_penalty": 3.0},
        {},
    ]
    rows = [row(seed, **params) for seed, params in enumerate(kinds)]
    together = sample_step(LOGITS_V.expand(5, -1).clone(), rows, "processed_logprobs", "v")
    alone = [sample_step(LOGITS_V[None].clone(), [r], "processed_logprobs", "v")[0] for r in rows]
    assert [s.token_id for s in together] == [s.token_id for s in alone]
    assert [s.logprob for s in together] == pytest.approx([s.logprob for s in alone], abs=1e-6)


def test_repetition_penalty_weakens_tokens_of_prompt_and_response() -> None:
    penalized = LOGITS_V.clone()
    penalized[1] /= 2.0
    (sample,) = sample_step(
        LOGITS_V[None].clone(), [row(repetition_penalty=2.0, logprobs=6)], "processed_logprobs", "v"
    )
    expected = penalized.log_softmax(-1)
    assert {token: logprob for token, logprob, _ in sample.top} == pytest.approx(
        {token: float(expected[token]) for token in range(6)}, abs=1e-6
    )
