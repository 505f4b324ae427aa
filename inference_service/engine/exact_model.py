"""Gives a transformers model operations of `async_rl.cpu.exact` where its own depend on what is beside a row."""

import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from async_rl.cpu import exact
from async_rl.errors import ConfigError


class ExactLinear(torch.nn.Linear):
    """torch's, with another forward: for inference only."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return exact.linear(input, self.weight, self.bias)


class ExactSiLU(torch.nn.Module):
    """The activation of the feed-forward parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return exact.silu(x)


def use_exact(model: PreTrainedModel) -> None:
    """Replaces activations and linear layers; norms and rotary embedding are exact as they are.

    Raises:
        ConfigError: another activation than SiLU.
    """
    silu = type(ACT2FN["silu"])
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            # A module around it would change the names of the weights.
            module.__class__ = ExactLinear
        activation = getattr(module, "act_fn", None)
        if activation is None:
            continue
        if not isinstance(activation, silu | ExactSiLU):
            raise ConfigError(
                f"the model has the activation {type(activation).__name__}: exact mode (train.exact, --exact) is for "
                "SiLU; serve it without"
            )
        module.act_fn = ExactSiLU()
