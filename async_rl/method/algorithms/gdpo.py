"""GDPO: each part of a composed reward is normalised by itself (arXiv 2601.05242).

    A_g = sum_k (R_k,g - mean(R_k)) / (std(R_k) + 1e-6) x weight_k,    then divided by the batch's deviation of these

With `scale_by_std = true` without the batch's deviation, with `false` without any. Else a part's scale has no effect,
so `weights` say what it counts, 1 by default; what an over-long rollout or a KL in the reward costs is a part, too,
"shaping". A group has the parts that scored it, which need not be all that `weights` name (the config checks these
names). The sums have the mean 0 in every group, and so in the batch: only the deviation is the batch's, one factor of
the denominator, and the paper's batch normalisation is exact in a stream.
"""

from collections.abc import Sequence

import torch

from async_rl.config.algorithm_section import SHAPING, WHOLE_REWARD
from async_rl.config.algorithm_traits import GDPOOptions
from async_rl.method.algorithms.base import Rollouts, Totals
from async_rl.method.algorithms.policy_gradient import STD_EPS, PolicyGradient, deviation


class GDPO(PolicyGradient):
    SCALES_BY_STD = "batch"
    Options = GDPOOptions
    options: GDPOOptions

    def has_gradient(self, rollouts: Rollouts) -> bool:
        differ = any(min(values) != max(values) for values in self._parts(rollouts).values())
        return super().has_gradient(rollouts) or (differ and bool(self.weights(rollouts).any()))

    def advantages(self, rollouts: Rollouts, totals: Totals | None) -> torch.Tensor:
        advantages_G = torch.zeros(len(rollouts.rewards), dtype=torch.float64)
        for name, values in self._parts(rollouts).items():
            values_G = torch.tensor(values, dtype=torch.float64)
            if values_G.min() != values_G.max():
                centered_G = values_G - values_G.mean()
                scale = values_G.std() + STD_EPS if self.scale_by_std else 1.0
                advantages_G += self.options.weights.get(name, 1.0) * centered_G / scale
        return advantages_G if totals is None else advantages_G / deviation(totals)

    def _batch_scaled(self, rollouts: Rollouts) -> Sequence[float]:
        scaled: list[float] = self.advantages(rollouts, None).tolist()
        return scaled

    def _parts(self, rollouts: Rollouts) -> dict[str, tuple[float, ...]]:
        """The parts of the reward, and what shaping adds to it; the reward itself where it has no parts."""
        return {**(rollouts.parts or {WHOLE_REWARD: rollouts.rewards}), SHAPING: self.shaping(rollouts)}
