"""Keys and values of a prompt, kept between the two stages of a group that is too long for one micro-batch.

Stage one runs the prompt once; every attention layer stores its keys and values here, a layer with a gated delta net
its final state and its last rows. Stage two runs the responses
against them in micro-groups; the backward of each micro-group adds to the gradients of the stored tensors. Finally the
prompt's own backward reads the summed gradients where the keys and values were computed. That is the chain rule of the
whole group, with the prompt computed once.

Stored tensors have the model's dtype; the sums of their gradients are float32 or wider. In bfloat16 a sum no longer
changes once it is 256 times what is added to it, and a group may have hundreds of micro-groups.

Shape legend: P prompt rows, or those of what else is stored, T rows of one micro-group, K key / value heads, D head
dimension, H hidden size.
"""

from typing import Any

import torch


class PromptCache:
    """One prompt's keys and values of every layer; `begin_responses` separates the stages."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str], _Kept] = {}
        self._hidden_1H: torch.Tensor | None = None
        self._last_1H: torch.Tensor | None = None
        self._with_responses = False

    def begin_responses(self, hidden_1H: torch.Tensor) -> None:
        """Ends stage one. `hidden_1H` is the prompt's last hidden row, which gives every response's first token."""
        self._with_responses = True
        self._hidden_1H = hidden_1H
        self._last_1H = hidden_1H.detach().to(_wide(hidden_1H.dtype), copy=True).requires_grad_()

    def last_row(self) -> torch.Tensor:
        """The prompt's last hidden row, [1, H], for one micro-group; its gradients are summed over micro-groups."""
        assert self._hidden_1H is not None and self._last_1H is not None, "stage two has not begun"
        return self._last_1H.to(self._hidden_1H.dtype)

    def extend(self, layer: int, key_TKD: torch.Tensor, value_TKD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stage one: stores a layer's keys and values. Stage two: puts the stored ones before them, [P + T, K, D]."""
        key, value = (self._extend(layer, name, x) for name, x in (("key", key_TKD), ("value", value_TKD)))
        return key, value

    def keep(self, layer: int, name: str, tensor: torch.Tensor, carrier: torch.Tensor) -> torch.Tensor:
        """Stage one: stores what only responses read; `carrier`, which is on the way to the prompt's hidden rows, is
        handed on, and brings the gradient back."""
        kept = self._kept.setdefault((layer, name), _Kept(tensor.detach()))
        handed_on: torch.Tensor = _Carry.apply(carrier, tensor, kept)  # type: ignore[no-untyped-call]
        return handed_on

    def kept(self, layer: int, name: str) -> torch.Tensor:
        """Stage two: what a layer has stored; its gradients are summed."""
        kept = self._kept[layer, name]
        none = kept.tensor_PKD[:0].requires_grad_()
        return self._appended(none, kept)

    def backward(self) -> None:
        """The prompt's backward, after that of every micro-group."""
        assert self._hidden_1H is not None and self._last_1H is not None, "stage two has not begun"
        self._with_responses = False  # recomputation runs stage one again
        grad = self._last_1H.grad
        grad_1H = torch.zeros_like(self._hidden_1H) if grad is None else grad.to(self._hidden_1H.dtype)
        torch.autograd.backward(self._hidden_1H, grad_1H)

    def _extend(self, layer: int, name: str, tensor_TKD: torch.Tensor) -> torch.Tensor:
        if self._with_responses:
            return self._appended(tensor_TKD, self._kept[layer, name])
        # Stored once: a recomputed forward uses the entry that holds the gradients.
        kept = self._kept.setdefault((layer, name), _Kept(tensor_TKD.detach()))
        handed_on: torch.Tensor = _AddGradient.apply(tensor_TKD, kept)  # type: ignore[no-untyped-call]
        return handed_on

    def _appended(self, tensor_TKD: torch.Tensor, kept: "_Kept") -> torch.Tensor:
        # `apply` is untyped in torch.
        appended: torch.Tensor = _Append.apply(tensor_TKD, kept)  # type: ignore[no-untyped-call]
        return appended


class _Kept:
    """Keys or values of the prompt in one layer, and the sum of their gradients, which is None while it is 0."""

    def __init__(self, tensor_PKD: torch.Tensor) -> None:
        self.tensor_PKD = tensor_PKD
        self._sum_PKD: torch.Tensor | None = None

    def add(self, grad_PKD: torch.Tensor) -> None:
        if self._sum_PKD is None:
            self._sum_PKD = grad_PKD.to(_wide(grad_PKD.dtype), copy=True)
        else:
            self._sum_PKD += grad_PKD

    def added_to(self, grad_PKD: torch.Tensor) -> torch.Tensor:
        """The sum plus one more gradient, rounded once to the dtype of `grad_PKD`."""
        return grad_PKD if self._sum_PKD is None else (self._sum_PKD + grad_PKD).to(grad_PKD.dtype)


class _Append(torch.autograd.Function):
    """Puts the prompt's rows before those of a micro-group; their gradient is added to the sum."""

    @staticmethod
    def forward(ctx: Any, tensor_TKD: torch.Tensor, kept: _Kept) -> torch.Tensor:
        ctx.kept = kept
        return torch.cat([kept.tensor_PKD, tensor_TKD])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        num_prompt_rows = len(ctx.kept.tensor_PKD)
        ctx.kept.add(grad[:num_prompt_rows])
        return grad[num_prompt_rows:], None


class _AddGradient(torch.autograd.Function):
    """Passes the prompt's rows through; adds the gradient sum of the micro-groups to their gradient."""

    @staticmethod
    def forward(ctx: Any, tensor_PKD: torch.Tensor, kept: _Kept) -> torch.Tensor:
        ctx.kept = kept
        return tensor_PKD.view_as(tensor_PKD)

    @staticmethod
    def backward(ctx: Any, grad_PKD: torch.Tensor) -> Any:
        return ctx.kept.added_to(grad_PKD), None


class _Carry(torch.autograd.Function):
    """Passes `carrier` through; the gradient of the tensor is the sum of the micro-groups' gradients."""

    @staticmethod
    def forward(ctx: Any, carrier: torch.Tensor, tensor: torch.Tensor, kept: _Kept) -> torch.Tensor:
        ctx.kept = kept
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, ctx.kept.added_to(torch.zeros_like(ctx.kept.tensor_PKD)), None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
