"""Keys and values of a prompt, kept between the two stages of a group that is too long for one micro-batch.

Stage one runs the prompt once; every attention layer leaves its keys and values here. Stage two runs the responses in
micro-groups against them; each one's backward adds to the gradients of what is kept. At last the prompt's own backward
picks these up at the place where keys and values were made. That is the chain rule of the whole group, with the prompt
computed once.

Shape legend: P prompt rows, S key / value rows, K key / value heads, D head dimension, H hidden size.
"""

from typing import Any

import torch


class PromptCache:
    """One prompt's keys and values of every layer; `begin_responses` separates the stages."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str], torch.Tensor] = {}
        self._hidden_1H: torch.Tensor | None = None
        self._last_1H: torch.Tensor | None = None
        self._with_responses = False

    def begin_responses(self, hidden_1H: torch.Tensor) -> torch.Tensor:
        """Ends stage one. Takes the prompt's last hidden row and returns it as a leaf that the micro-groups share."""
        self._with_responses = True
        self._hidden_1H = hidden_1H
        self._last_1H = _leaf(hidden_1H)
        return self._last_1H

    def extend(self, layer: int, key_TKD: torch.Tensor, value_TKD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stage one: keeps a layer's keys and values. Stage two: puts the kept ones before them, [P + T, K, D]."""
        key, value = (self._extend(layer, name, x) for name, x in (("key", key_TKD), ("value", value_TKD)))
        return key, value

    def backward(self) -> None:
        """The prompt's backward, after that of every micro-group."""
        assert self._hidden_1H is not None and self._last_1H is not None, "stage two has not begun"
        self._with_responses = False  # recomputation runs stage one again
        grad = self._last_1H.grad
        torch.autograd.backward(self._hidden_1H, torch.zeros_like(self._hidden_1H) if grad is None else grad)

    def _extend(self, layer: int, name: str, tensor_TKD: torch.Tensor) -> torch.Tensor:
        if self._with_responses:
            return torch.cat([self._kept[layer, name], tensor_TKD])
        # Kept once: a recomputed forward finds the leaf that holds the gradients.
        leaf = self._kept.setdefault((layer, name), _leaf(tensor_TKD))
        return _AddGradient.apply(tensor_TKD, leaf)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_()


class _AddGradient(torch.autograd.Function):
    """Hands a tensor on; its gradient is increased by the one that `leaf`, its detached copy, has received."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        ctx.leaf = leaf
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        extra = ctx.leaf.grad
        return (grad if extra is None else grad + extra), None
