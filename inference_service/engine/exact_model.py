"""Gives a transformers model the operations of `async_rl.kernels.exact` where its own depend on what is beside a row."""

import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from async_rl.errors import ConfigError
from async_rl.kernels import exact


class ExactSiLU(torch.nn.Module):
    """The activation of the feed-forward parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return exact.silu(x)


def use_exact(model: PreTrainedModel) -> None:
    """Replaces the activations; norms, rotary embedding and products of matrices are exact as they are.

    Raises:
        ConfigError: another activation than SiLU.
    """
    silu = type(ACT2FN["silu"])
    for module in model.modules():
        activation = getattr(module, "act_fn", None)
        if activation is None:
            continue
        if not isinstance(activation, silu | ExactSiLU):
            raise ConfigError(
                f"the model has the activation {type(activation).__name__}: exact mode (train.exact, --exact) is for "
                "SiLU; serve it without"
            )
        module.act_fn = ExactSiLU()
