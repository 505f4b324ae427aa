"""The products of either library against float64, at every side of the limits between them."""

import itertools
import subprocess
import sys

import pytest
import torch

from async_rl.shared.cpu import products
from async_rl.shared.cpu.products import MIN_SIZE, linear, matmul

ROWS = (1, 2, 7, 255, 256, 257, 1000)
SIZES = ((1, 1), (5, 3), (64, 200), (300, 41), (512, MIN_SIZE // 512 // 256), (1024, MIN_SIZE // 1024))
SHAPES = [(rows, *size) for rows, size in itertools.product(ROWS, SIZES) if rows == 1 or size[1] < 2**15]

LARGE = (2**12, 2**7, 2**7)
"""Rows, inputs and outputs of a product of `MIN_SIZE`."""


def error(product: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> float:
    """Relative to the largest element."""
    exact = left.double() @ right.double()
    return float((product.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), SHAPES, ids=str)
def test_products_are_those_of_float64_in_any_layout(num_rows: int, num_inputs: int, num_outputs: int) -> None:
    left, right = torch.randn(num_rows, num_inputs), torch.randn(num_inputs, num_outputs)
    for one in (left, left.T.contiguous().T):
        for other in (right, right.T.contiguous().T):
            product = matmul(one, other)
            assert product.shape == (num_rows, num_outputs)
            assert error(product, left, right) <= 1e-5
    bias = torch.randn(num_outputs)
    assert error(linear(left, right.T, bias) - bias, left, right) <= 1e-5
    assert torch.equal(linear(left[:, None], right.T, None)[:, 0], matmul(left, right))


def test_leading_dimensions_are_rows() -> None:
    num_rows, num_inputs, num_outputs = LARGE
    left, right = torch.randn(3, num_rows, num_inputs), torch.randn(num_inputs, num_outputs)
    product = matmul(left, right)
    assert product.shape == (3, num_rows, num_outputs)
    assert error(product.flatten(0, 1), left.flatten(0, 1), right) <= 1e-5


def test_no_rows_give_no_rows() -> None:
    assert matmul(torch.randn(0, 16), torch.randn(16, 8)).shape == (0, 8)
    assert linear(torch.randn(2, 0, 16), torch.randn(8, 16), None).shape == (2, 0, 8)


def test_products_that_autograd_records_have_gradients() -> None:
    num_rows, num_inputs, num_outputs = LARGE
    left = torch.randn(num_rows, num_inputs, requires_grad=True)
    right = torch.randn(num_inputs, num_outputs)
    matmul(left, right).sum().backward()
    torch.testing.assert_close(left.grad, right.sum(1).expand(num_rows, num_inputs))
    with torch.no_grad():
        assert not matmul(left, right).requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_torchs_own(dtype: torch.dtype) -> None:
    num_rows, num_inputs, num_outputs = LARGE
    left, right = torch.randn(num_rows, num_inputs).to(dtype), torch.randn(num_inputs, num_outputs).to(dtype)
    assert torch.equal(matmul(left, right), left @ right)


def test_library_depends_on_shape_and_processor_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: object) -> torch.Tensor:
        calls.append(args)
        return torch.empty(0)

    monkeypatch.setattr(products, "_linear", counted)
    num_rows, num_inputs, num_outputs = LARGE
    weight, wide = torch.randn(num_inputs, num_outputs), torch.randn(16, MIN_SIZE // 16)
    for has_onednn, expected in ((True, 2), (False, 0)):
        monkeypatch.setattr(products, "_HAS_ONEDNN", has_onednn)
        calls.clear()
        matmul(torch.randn(num_rows - 1, num_inputs), weight)
        matmul(torch.randn(num_rows, num_inputs), weight)
        matmul(torch.randn(1, 16), wide)
        assert len(calls) == expected


PROGRAM = """
import psutil, torch
from async_rl.shared.cpu.products import linear
weight, x = torch.randn(1024, 256), torch.randn(456, 256)
linear(x, weight, None)
before = psutil.Process().memory_info().rss
for num_rows in range(256, 456):
    linear(x[:num_rows], weight, None)
print(psutil.Process().memory_info().rss - before)
"""


@pytest.mark.distributed
def test_memory_does_not_grow_with_the_number_of_shapes() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    # 50 MiB; the kernels of all 200 shapes have 280 MiB.
    assert int(done.stdout) < 128 * 2**20
