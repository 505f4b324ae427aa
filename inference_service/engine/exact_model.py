"""Gives a transformers model operations of `async_rl.cpu.exact` where its own depend on what is beside a row."""

import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from async_rl.cpu import exact
from async_rl.errors import ConfigError


class BiasLast(torch.nn.Linear):
    """Adds the bias to the whole product, as Megatron's layers do; torch's own starts some sums with it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input @ self.weight.T + self.bias


class ExactSiLU(torch.nn.Module):
    """The activation of the feed-forward parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return exact.silu(x)


def use_exact(model: PreTrainedModel) -> None:
    """Replaces activations and biases; norms, rotary embedding and products of matrices are exact as they are.

    Raises:
        ConfigError: another activation than SiLU.
    """
    silu = type(ACT2FN["silu"])
    for module in model.modules():
        if type(module) is torch.nn.Linear and module.bias is not None:
            # A module around it would change the names of the weights.
            module.__class__ = BiasLast
        activation = getattr(module, "act_fn", None)
        if activation is None:
            continue
        if not isinstance(activation, silu | ExactSiLU):
            raise ConfigError(
                f"the model has the activation {type(activation).__name__}: exact mode (train.exact, --exact) is for "
                "SiLU; serve it without"
            )
        module.act_fn = ExactSiLU()
