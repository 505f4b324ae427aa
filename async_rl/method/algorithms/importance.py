"""Corrections for what trainer and instance computed differently: importance weights of sampled tokens.

With pi the probability of a token under the trainer's copy of the weights that sampled and mu the one that the
instance reported, w = pi / mu per token, or the product of these over a response per sequence. `truncate` multiplies
the loss of the policy with min(w, high) (truncated importance sampling, TIS, Yao et al. 2025), `mask` with w within
[low, high] and 0 outside of it (masked importance sampling, IcePop, Ling team 2025). Neither has a gradient, and
neither changes the KL and entropy terms.

verl calls them `rollout_is` and `rollout_rs`, TRL `vllm_importance_sampling_mode`, slime `--use-tis`. On sound engines
w differs from 1 by rounding only: `corrected` in the ledger counts the tokens whose weight a limit changed.
"""

import math
from typing import Literal

import torch

from async_rl.method.algorithms.base import Responses
from async_rl.method.algorithms.log_ratio import exp

Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class ImportanceWeights:
    """The weights of one setting."""

    def __init__(self, correction: Correction, low: float, high: float) -> None:
        self._per_sequence = correction.startswith("sequence")
        self._masks = correction.endswith("mask")
        self._low, self._high = low, high

    def of(self, gaps_N: torch.Tensor, responses: Responses) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights, whether a limit changed them) of tokens, [N] each, from log pi - log mu."""
        if self._per_sequence:
            gaps_N = responses.per_token(responses.summed(gaps_N), len(gaps_N))
        changed_N = self._changed(gaps_N)
        weights_N = exp(gaps_N)
        if self._masks:
            return torch.where(changed_N, 0.0, weights_N), changed_N
        return weights_N.clamp(max=self._high), changed_N

    def num_changed(self, gaps_N: torch.Tensor) -> int:
        """How many tokens of one response a limit changed the weight of; `gaps_N` on the host."""
        if self._per_sequence:
            return len(gaps_N) * int(self._changed(gaps_N.sum()))
        return int(self._changed(gaps_N).sum())

    def _changed(self, gaps: torch.Tensor) -> torch.Tensor:
        # Compared as logarithms: the same decision in float32 and float64, and no overflow.
        above = gaps > math.log(self._high)
        if not self._masks or self._low == 0:
            return above
        return above | (gaps < math.log(self._low))
