"""The CPU's operations against those of `layer_ops` and torch, forward and gradients, on fresh random inputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainer.devices import layer_ops
from trainer.devices.cpu_ops import linear, rms_norm, rotary

LIMITS = {torch.float64: 1e-12, torch.float32: 2e-5}
"""Relative to the largest element."""

NORM_LIMITS = LIMITS | {torch.bfloat16: 2.0**-8}
"""A norm in bfloat16 is rounded once: by 2^-8 of an element at most."""

NORM_SHAPES = ((7, 16), (1, 8), (5, 1, 96), (9, 1, 4, 32), (300, 1, 8, 64))


def with_gradients(op: Callable[..., torch.Tensor], inputs: list[torch.Tensor], dout: torch.Tensor) -> list[Any]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = op(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def assert_as_exact(
    op: Callable[..., torch.Tensor], reference: Callable[..., torch.Tensor], inputs: list[torch.Tensor]
) -> None:
    dout = torch.randn_like(reference(*inputs))
    wide = with_gradients(reference, [x.double() for x in inputs], dout.double())
    for actual, exact in zip(with_gradients(op, inputs, dout), wide, strict=True):
        assert actual.dtype == inputs[0].dtype and actual.shape == exact.shape
        scale = exact.abs().max().clamp(min=1e-30)
        assert float((actual.double() - exact).abs().max() / scale) <= NORM_LIMITS[actual.dtype]


@pytest.mark.parametrize("dtype", NORM_LIMITS, ids=str)
@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_rms_norm_and_its_gradients(shape: tuple[int, ...], dtype: torch.dtype, scale: float) -> None:
    inputs = [torch.randn(shape, dtype=dtype) * scale, torch.randn(shape[-1], dtype=dtype)]
    assert_as_exact(lambda x, w: rms_norm(x, w, 1e-6), lambda x, w: layer_ops.rms_norm(x, w, 1e-6), inputs)


def test_rms_norm_of_zeros_and_of_a_view() -> None:
    whole = torch.randn(6, 1, 24)
    whole[2] = 0.0
    inputs = [whole[..., 4:20], torch.randn(16)]
    assert_as_exact(lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: layer_ops.rms_norm(x, w, 1e-5), inputs)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 2), (9, 3, 16), (40, 8, 64)], ids=str)
def test_rotary_and_its_gradient(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    half = torch.randn(shape[0], 1, shape[2] // 2, dtype=torch.float64)
    angles = torch.cat([half, half], dim=-1)

    def by(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda x: op(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))

    assert_as_exact(by(rotary), by(layer_ops.rotary), [torch.randn(shape, dtype=dtype)])


@pytest.mark.parametrize("num_rows", [3, 700])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_layer_has_the_gradients_of_torchs(num_rows: int, has_bias: bool) -> None:
    inputs = [torch.randn(num_rows, 1, 24), torch.randn(40, 24)] + ([torch.randn(40)] if has_bias else [])

    def ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, weight, bias, allreduce_dgrad=False, tp_group=None, sequence_parallel=False)

    assert_as_exact(ours, torch.nn.functional.linear, inputs)
