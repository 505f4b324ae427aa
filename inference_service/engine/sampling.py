"""From logits to tokens: penalties, temperature, truncation, and noise that depends on (seed, position) only.

Shapes: R rows (sequences that get a token in this step), V vocabulary. Everything is float32 except cumulative
probabilities, which are float64. The order of the steps is that of vLLM: repetition penalty, min_tokens, temperature,
min_p, top_k, top_p. Temperature 0 means the most likely token, without truncation.
"""

from collections.abc import Sequence as Rows
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from async_rl.shared.cpu.exact import MASS_BLOCK as BLOCK
from async_rl.shared.cpu.exact import block_masses, log_normalizer
from async_rl.shared.protocol.inference import SamplingParams
from inference_service.engine.sequences import Sequence
from inference_service.engine_interface import LogprobsMode, Sample

Bits: TypeAlias = npt.NDArray[np.uint64]

UNIFORM_BITS: Final = 40
"""Bits of one uniform number: few enough that u * total < total in float64, so no draw falls after the last token."""


BELOW_ONE: Final = 1.0 - 2.0**-UNIFORM_BITS

GREEDY_BELOW: Final = 1e-5
"""Smaller temperatures mean the most likely token, as in vLLM: logits divided by them would overflow."""


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_BELOW


def uniforms(seeds: Rows[int], positions: Rows[int]) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1), one per (seed, position), by a counter-based hash.

    A position is the number of tokens before the one to draw, in prompt and response. The same pair gives the same
    number on every instance and in every batch, so a seeded request is reproducible wherever and in whatever batch it
    runs. The position does not depend on where the prompt ends, so a request whose prompt is another request's prompt
    plus the beginning of its response draws the rest of that response. The hash is splitmix64's output function over
    both.
    """
    seed_R = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)
    position_R = np.array(positions, dtype=np.uint64)
    golden = np.uint64(0x9E3779B97F4A7C15)
    bits_R = _mix(_mix(seed_R + golden) + golden * (position_R + np.uint64(1)))
    top_bits_R: npt.NDArray[np.float64] = (bits_R >> np.uint64(64 - UNIFORM_BITS)).astype(np.float64)
    return top_bits_R * 2.0**-UNIFORM_BITS


def _mix(bits_R: Bits) -> Bits:
    bits_R = (bits_R ^ (bits_R >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits_R = (bits_R ^ (bits_R >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits_R ^ (bits_R >> np.uint64(31))


def sample_step(logits_RV: torch.Tensor, rows: Rows[Sequence], mode: LogprobsMode, version: str) -> list[Sample]:
    """Draws one token per row; the samples' log-probs are of the raw model or after all processing, by `mode`.

    A row with non-finite logits yields a sample with a NaN log-prob.
    """
    processed_RV = _process(logits_RV, rows)
    highest_R1 = processed_RV.amax(dim=-1, keepdim=True)
    weights_RV = (processed_RV - highest_R1).exp_()
    masses_RB = block_masses(weights_RV)
    is_drawn = [not is_greedy(row.params) for row in rows]
    if any(is_drawn):
        u_R = torch.from_numpy(uniforms([row.seed for row in rows], [row.num_tokens for row in rows]))
        tokens_R = _inverse_cdf(weights_RV, masses_RB, u_R.to(logits_RV.device))
    if not all(is_drawn):
        likeliest_R = processed_RV.argmax(dim=-1)
        drawn_R = torch.tensor(is_drawn, device=logits_RV.device)
        tokens_R = torch.where(drawn_R, tokens_R, likeliest_R) if any(is_drawn) else likeliest_R
    if mode == "raw_logprobs" and processed_RV is not logits_RV:
        normalizer_R1 = logits_RV.logsumexp(dim=-1, keepdim=True)
        return _samples(logits_RV, normalizer_R1, tokens_R, rows, version)
    normalizer_R1 = log_normalizer(highest_R1, masses_RB)
    return _samples(processed_RV, normalizer_R1, tokens_R, rows, version)


def score_step(logits_RV: torch.Tensor, tokens: Rows[int], sequence: Sequence, version: str) -> list[Sample]:
    """A prompt's next tokens as if the raw model had sampled them."""
    tokens_R = torch.tensor(tokens, device=logits_RV.device)
    normalizer_R1 = logits_RV.logsumexp(dim=-1, keepdim=True)
    return _samples(logits_RV, normalizer_R1, tokens_R, [sequence] * len(tokens), version)


def _inverse_cdf(weights_RV: torch.Tensor, masses_RB: torch.Tensor, u_R: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative weight exceeds u times the total; one of weight zero is never chosen.

    First the block of the token is found, then the token in its block: a cumulative sum over the vocabulary would cost
    more than the rest of a step with a large one.
    """
    cdf_RB = masses_RB.cumsum(dim=-1)
    target_R1 = u_R.unsqueeze(-1) * cdf_RB[:, -1:]
    block_R1 = _first_above(cdf_RB, target_R1)
    before_R1 = (cdf_RB.gather(-1, block_R1) - masses_RB.gather(-1, block_R1)).clamp_(min=0.0)
    token_RT = block_R1 * BLOCK + torch.arange(BLOCK, device=weights_RV.device)
    inside_RT = token_RT < weights_RV.shape[-1]
    own_RT = weights_RV.gather(-1, token_RT.clamp(max=weights_RV.shape[-1] - 1)).double()
    cdf_RT = torch.where(inside_RT, own_RT, 0.0).cumsum(dim=-1)
    # The block's mass is rounded differently than the sum of its weights.
    within_R1 = (target_R1 - before_R1).clamp_(min=0.0).minimum(cdf_RT[:, -1:] * BELOW_ONE)
    return (block_R1 * BLOCK + _first_above(cdf_RT, within_R1)).squeeze(-1).clamp_(max=weights_RV.shape[-1] - 1)


def _first_above(cdf: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    # Only a row of NaN can give an index after the last.
    return torch.searchsorted(cdf, target, right=True).clamp_(max=cdf.shape[-1] - 1)


def _process(logits_RV: torch.Tensor, rows: Rows[Sequence]) -> torch.Tensor:
    """Logits after all parameters except the noise; the input is not changed."""
    logits_RV = _penalize(logits_RV, rows)
    temperatures = [1.0 if is_greedy(row.params) else row.params.temperature for row in rows]
    if any(t != 1.0 for t in temperatures):
        logits_RV = logits_RV / torch.tensor(temperatures, device=logits_RV.device).unsqueeze(-1)
    truncated = [r for r, row in enumerate(rows) if not is_greedy(row.params) and _truncates(row.params)]
    if truncated:
        logits_RV = logits_RV.clone()
        logits_RV[truncated] = _truncate(logits_RV[truncated], [rows[r].params for r in truncated])
    return logits_RV


def _penalize(logits_RV: torch.Tensor, rows: Rows[Sequence]) -> torch.Tensor:
    """Repetition penalty over prompt and response, and no stop token before `min_tokens`."""
    penalized = [r for r, row in enumerate(rows) if row.params.repetition_penalty != 1.0]
    too_short = [r for r, row in enumerate(rows) if row.stop_ids and len(row.samples) < row.params.min_tokens]
    if not penalized and not too_short:
        return logits_RV
    logits_RV = logits_RV.clone()
    for r in penalized:
        penalty = rows[r].params.repetition_penalty
        seen = torch.tensor(sorted(set(rows[r].token_ids())), device=logits_RV.device)
        values = logits_RV[r, seen]
        logits_RV[r, seen] = torch.where(values > 0, values / penalty, values * penalty)
    for r in too_short:
        logits_RV[r, sorted(rows[r].stop_ids)] = -torch.inf
    return logits_RV


def _truncates(params: SamplingParams) -> bool:
    return params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0


def _truncate(logits_RV: torch.Tensor, params: Rows[SamplingParams]) -> torch.Tensor:
    """Sets the logits of all tokens outside min_p, top_k and top_p to -inf; at least one token remains.

    top_p keeps the fewest likeliest tokens whose mass, of what min_p and top_k left, reaches it. Of equally likely ones
    those with the smaller ids come first, so top_k keeps exactly k (vLLM keeps all that are as likely as the k-th).
    """
    vocab_size = logits_RV.shape[-1]

    def column(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=logits_RV.device).unsqueeze(-1)

    min_p_R1 = column([p.min_p for p in params])
    top_k_R1 = column([min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params], torch.int64)
    # Without truncation the mass before a token must never reach the bound, whatever the rounding.
    top_p_R1 = column([p.top_p if p.top_p < 1.0 else torch.inf for p in params], torch.float64)

    probs_RV = logits_RV.softmax(dim=-1)
    logits_RV = logits_RV.masked_fill(probs_RV < min_p_R1 * probs_RV.amax(dim=-1, keepdim=True), -torch.inf)
    sorted_RV, order_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    place_V = torch.arange(vocab_size, device=logits_RV.device)
    sorted_RV = sorted_RV.masked_fill(place_V >= top_k_R1, -torch.inf)
    # Many tokens of a large vocabulary have less than the last digit of a sum in float32.
    probs_RV = sorted_RV.double().softmax(dim=-1)
    mass_before_RV = probs_RV.cumsum(dim=-1) - probs_RV
    # The first token always stays, however small top_p is.
    sorted_RV = sorted_RV.masked_fill((mass_before_RV >= top_p_R1) & (place_V > 0), -torch.inf)
    return torch.empty_like(logits_RV).scatter_(-1, order_RV, sorted_RV)


def _samples(
    logits_RV: torch.Tensor, normalizer_R1: torch.Tensor, tokens_R: torch.Tensor, rows: Rows[Sequence], version: str
) -> list[Sample]:
    """With log-probs `logits - normalizer`."""
    chosen_R1 = logits_RV.gather(-1, tokens_R.unsqueeze(-1))
    # Bytes are summed several times faster than truth values.
    ranks = ((logits_RV > chosen_R1).view(torch.uint8).sum(dim=-1, dtype=torch.int32) + 1).tolist()
    tokens, logprobs = tokens_R.tolist(), (chosen_R1 - normalizer_R1).squeeze(-1).tolist()
    tops: dict[int, tuple[tuple[int, float, int], ...]] = {}
    for r, row in enumerate(rows):
        if row.params.logprobs:
            values, ids = logits_RV[r].topk(min(row.params.logprobs, logits_RV.shape[-1]))
            best_logprobs = (values - normalizer_R1[r]).tolist()
            best = [(i, v, k) for k, (i, v) in enumerate(zip(ids.tolist(), best_logprobs, strict=True), start=1)]
            others = [entry for entry in best if entry[0] != tokens[r]]
            tops[r] = ((tokens[r], logprobs[r], ranks[r]), *others)
    return [
        Sample(token, logprob, rank, tops.get(r, ()), version)
        for r, (token, logprob, rank) in enumerate(zip(tokens, logprobs, ranks, strict=True))
    ]
