"""Whether two trainers that began with the same weights have learned the same."""

from collections.abc import Mapping

import torch

MAX_DIFFERENCE = 1e-3
"""Between rounding and the smallest fault. Sums in another order differ by about 1e-6 of a gradient; advantages cancel,
and AdamW enlarges what is small, so that up to 6e-5 of the weights' way was measured. One response of a hundred,
trained wrongly or not at all, is about 1e-2 of it.
"""


def copy_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def weight_difference(
    weights: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], first: Mapping[str, torch.Tensor]
) -> float:
    """How far `weights` are from `expected`, relative to how far these have moved from `first`: |w - e| / |e - f|.

    The largest over all tensors. Relative to the weights themselves it would be small whatever was trained.
    """
    return max(
        float((weights[name] - expected[name]).norm() / (expected[name] - first[name]).norm()) for name in expected
    )
