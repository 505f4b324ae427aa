"""Matrix products in float32 on a CPU, by the faster of the libraries that PyTorch includes.

torch.matmul calls MKL, which uses AVX2 on processors of other makers than Intel; oneDNN uses AVX-512 on all of them.
Which of the two computes a product depends on its shape and on the processor only, never on a measurement: a run that
is repeated, or resumed, rounds as it did before.

Shape legend: M rows, K summed over, N columns.
"""

import os
import platform

import torch

MIN_SIZE = 2**26
"""Smaller M K N are MKL's: there oneDNN saves less than it takes to make its kernel for another M, a millisecond or two
(`docs/benchmarks.md`)."""

KERNELS_KEPT = 16
"""For each shape oneDNN makes a kernel, whose working memory may be as large as the matrix. By default 1,024 of them
stay, some for every number of rows that ever occurred; these are enough for the layers of one pass, which share theirs.
"""

# Read at the first product: by PyTorch's interface to oneDNN, and by oneDNN.
for _variable in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(_variable, str(KERNELS_KEPT))

_linear = torch.ops.mkldnn._linear_pointwise


def has_onednn() -> bool:
    """Whether this process computes some products by oneDNN."""
    return (
        platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
    )


_HAS_ONEDNN = has_onednn()


def matmul(left_MK: torch.Tensor, right_KN: torch.Tensor) -> torch.Tensor:
    """`torch.matmul` of a tensor of any dimensions, [..., K], and a matrix; without gradients if by oneDNN.

    Where autograd would record the product, it is torch's own.
    """
    if _by_onednn(left_MK, right_KN):
        product: torch.Tensor = _linear(left_MK, right_KN.t(), None, "none", [], "")
        return product
    return torch.matmul(left_MK, right_KN)


def linear(x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    """`torch.nn.functional.linear`, as `matmul` computes it."""
    if _by_onednn(x_MK, weight_NK.t()):
        product: torch.Tensor = _linear(x_MK, weight_NK, bias_N, "none", [], "")
        return product
    return torch.nn.functional.linear(x_MK, weight_NK, bias_N)


class Linear(torch.nn.Linear):
    """torch's, with another forward: for inference only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


def use_faster_products(model: torch.nn.Module) -> None:
    """Makes every plain linear layer a `Linear`, in place: its weights and their names stay."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = Linear


def _by_onednn(left_MK: torch.Tensor, right_KN: torch.Tensor) -> bool:
    if not _HAS_ONEDNN or right_KN.dim() != 2 or left_MK.dim() < 2:
        return False
    # oneDNN's product is unknown to autograd.
    if torch.is_grad_enabled() and (left_MK.requires_grad or right_KN.requires_grad):
        return False
    tensors = (left_MK, right_KN)
    if any(x.dtype != torch.float32 or x.device.type != "cpu" or x.numel() == 0 for x in tensors):
        return False
    return left_MK.numel() * right_KN.shape[1] >= MIN_SIZE
