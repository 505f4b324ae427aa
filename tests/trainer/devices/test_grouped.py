"""The products of experts, by each of the ways to compute them, against one product per expert in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.devices.fake_torch_npu import FakeTorchNPU
from trainer.devices import layer_ops
from trainer.devices.layer_ops import HAS_GROUPED_MM, grouped_linear, takes_grouped_mm
from trainer.devices.npu_ops import NPUOps

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def npu(*inputs: torch.Tensor) -> torch.Tensor:
    torch_npu: Any = FakeTorchNPU()
    return NPUOps(torch_npu).grouped_linear(*inputs)


def one_by_one(*inputs: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = layer_ops._OneByOne.apply(*inputs)  # type: ignore[no-untyped-call]
    return out


def expected(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    starts = [0, *ends.tolist()]
    return torch.cat([x[starts[e] : starts[e + 1]] @ weight[e].T for e in range(len(weight))])


def results(product: Product, dtype: torch.dtype, counts: list[int], sizes: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    num_rows, (inputs, outputs) = sum(counts), sizes
    shapes = ((num_rows, inputs), (len(counts), outputs, inputs), (num_rows, outputs))
    x, weight, dout = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    leaves = (x.requires_grad_(), weight.requires_grad_())
    out = product(*leaves, torch.tensor(counts).cumsum(0, dtype=torch.int32))
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 4], [7], [0, 0]], ids=str)
@pytest.mark.parametrize("sizes", [(8, 16), (5, 3)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("product", [grouped_linear, one_by_one, npu])
def test_products_and_gradients_are_those_of_every_expert(
    product: Product, dtype: torch.dtype, sizes: tuple[int, int], counts: list[int]
) -> None:
    actual = results(product, dtype, counts, sizes)
    for got, wanted in zip(actual, results(expected, torch.float64, counts, sizes), strict=True):
        assert got.dtype == dtype
        scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
        torch.testing.assert_close(got.double(), wanted, atol=TOLERANCES[dtype] * scale, rtol=0)


@pytest.mark.parametrize(
    ("device", "dtype", "size", "num_rows", "taken"),
    [
        ("cpu", torch.float32, 8, 3, True),
        ("cpu", torch.float64, 8, 3, False),
        ("cpu", torch.float32, 6, 3, False),
        ("cpu", torch.float32, 8, 0, False),
        ("cpu", torch.bfloat16, 12, 3, False),
        ("meta", torch.bfloat16, 16, 3, False),
    ],
)
def test_torch_is_asked_only_for_what_it_takes(
    device: str, dtype: torch.dtype, size: int, num_rows: int, taken: bool
) -> None:
    x, weight = (torch.empty(shape, dtype=dtype, device=device) for shape in ((num_rows, size), (2, 8, size)))
    assert takes_grouped_mm(x, weight) == (taken and HAS_GROUPED_MM)
