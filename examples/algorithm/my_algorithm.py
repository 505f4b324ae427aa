"""An algorithm of your own: `algorithm.name = "python:my_algorithm.py:MedianBaseline"`.

Options of it are in `[algorithm.options]`; all other settings of `[algorithm]` are those of `PolicyGradient`.
"""

import torch
from pydantic import Field

from async_rl.config.section import Section
from async_rl.method.algorithms import PolicyGradient


class MedianOptions(Section):
    below: float = Field(0.5, ge=0)


class MedianBaseline(PolicyGradient):
    """A_g = R_g - median(R), times `below` where it is negative; the loss is PPO's clipped one."""

    SCALES_BY_STD = False
    UNUSED = ("scale_by_std",)
    Options = MedianOptions
    options: MedianOptions

    def _advantages(self, rewards_G: torch.Tensor) -> torch.Tensor:
        """Rewards of one group, float64, not all equal -> advantages, float64 [G]."""
        above_G = rewards_G - rewards_G.median()
        return torch.where(above_G < 0, self.options.below * above_G, above_G)
