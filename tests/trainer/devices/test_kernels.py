"""The kernels of CUDA and NPU, on operators that follow their documentation, against dense attention."""

import logging
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.devices.attention_inputs import CPU, make_inputs
from tests.support.devices.fake_flash import FakeFlash
from tests.support.devices.fake_torch_npu import FakeTorchNPU
from trainer.attention.segments import Segments
from trainer.attention.shared_attention import LONG_SEGMENTS, checked_kernel, shared_prompt_attention
from trainer.devices import AttentionKernel
from trainer.devices.attention_part import Part
from trainer.devices.composed_attention import QUERY_BLOCK, ComposedAttention
from trainer.devices.cpu_attention import CPUAttention
from trainer.devices.cuda_attention import CUDAAttention
from trainer.devices.npu_attention import NPUAttention

HEADS = (6, 2)
HEAD_DIM = 16
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def cuda_kernel(*dtypes: torch.dtype) -> CUDAAttention:
    fake = FakeFlash(dtypes)
    return CUDAAttention(fake.forward, fake.backward, dtypes)


def npu_kernel(*dtypes: torch.dtype) -> NPUAttention:
    return NPUAttention(FakeTorchNPU(dtypes), dtypes)  # type: ignore[arg-type]


KERNELS = {
    "cpu": lambda *_: CPUAttention(),
    "cpu of torch below 2.9": lambda *_: CPUAttention(takes_unequal_heads=False),
    "cuda": cuda_kernel,
    "npu": npu_kernel,
    "composed": lambda *_: ComposedAttention(),
}


def results(
    inputs: Any,
    segments: Segments,
    kernel: AttentionKernel | None,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Output and gradients of query, key and value, and of the sinks."""
    *qkv, dout = inputs
    leaves = [tensor.detach().requires_grad_() for tensor in qkv]
    sinks = [] if sinks_H is None else [sinks_H.detach().requires_grad_()]
    options = {"sinks_H": sinks[0]} if sinks else {}
    out = shared_prompt_attention(*leaves, segments, HEAD_DIM**-0.5, kernel, window=window, **options)
    return [out.detach(), *torch.autograd.grad(out, [*leaves, *sinks], dout)]


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("device", KERNELS)
def test_kernel_gives_output_and_gradients_of_dense_attention(
    device: str, dtype: torch.dtype, window: int | None, segments: Segments
) -> None:
    if device.startswith("cpu") and dtype == torch.float16:
        pytest.skip("the CPU kernel takes float16 only on some processors")
    inputs = make_inputs(segments, dtype, HEADS, HEAD_DIM)
    expected = results([tensor.double() for tensor in inputs], segments, None, window)
    for actual, wanted in zip(results(inputs, segments, KERNELS[device](dtype), window), expected, strict=True):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), wanted, atol=TOLERANCES[dtype] * max(1, wanted.abs().max()), rtol=0)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("device", KERNELS)
def test_sinks_are_in_the_output_and_gradients_of_every_kernel(
    device: str, dtype: torch.dtype, window: int | None, segments: Segments
) -> None:
    if device.startswith("cpu") and dtype == torch.float16:
        pytest.skip("the CPU kernel takes float16 only on some processors")
    inputs, sinks_H = make_inputs(segments, dtype, HEADS, HEAD_DIM), torch.randn(HEADS[0]).to(dtype)
    expected = results([tensor.double() for tensor in inputs], segments, None, window, sinks_H.double())
    found = results(inputs, segments, KERNELS[device](dtype), window, sinks_H)
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), wanted, atol=TOLERANCES[dtype] * max(1, wanted.abs().max()), rtol=0)


@pytest.mark.parametrize("kernel", [cuda_kernel(torch.bfloat16), npu_kernel(torch.bfloat16)], ids=["cuda", "npu"])
def test_cross_part_reaches_the_kernel_backward_with_merged_statistics(kernel: AttentionKernel) -> None:
    # A response row as likely to look at its prompt as at itself: half of the probability lies in either part.
    part = Part((1,), (1,), False, CPU)
    one, two = torch.ones(1, 1, 16, dtype=torch.bfloat16), torch.full((1, 1, 16), 2.0, dtype=torch.bfloat16)
    lse_of_both = torch.log(torch.full((1, 1), 2.0)) + 16.0
    *_, dvalue = kernel.backward(one, one, one, two, two, lse_of_both, part, 1.0)
    torch.testing.assert_close(dvalue, 0.5 * one)


def test_npu_call_takes_at_most_1024_sequences() -> None:
    lens = (1, 2, 1) * 350
    fake = FakeTorchNPU((torch.float64,))
    segments = Segments(Part(lens, lens, True, CPU), None)
    inputs = make_inputs(segments, torch.float64, (2, 1), 16)
    kernel = NPUAttention(fake, (torch.float64,))  # type: ignore[arg-type]
    query, key, value, dout = inputs
    out, lse = kernel.forward(query, key, value, segments.self_part, 0.25)
    grads = kernel.backward(dout, query, key, value, out, lse, segments.self_part, 0.25)
    assert [call["entries"] for call in fake.calls] == [1024, 26] * 2
    expected_out, expected_lse = CPUAttention().forward(query, key, value, segments.self_part, 0.25)
    expected = CPUAttention().backward(dout, query, key, value, expected_out, expected_lse, segments.self_part, 0.25)
    torch.testing.assert_close([out, lse, *grads], [expected_out, expected_lse, *expected])


def test_npu_self_part_is_causal_under_a_mask_and_cross_part_full_without() -> None:
    fake = FakeTorchNPU((torch.float32,))
    segments = Segments(Part((3, 2), (3, 2), True, CPU), Part((2,), (3,), False, CPU), cross_q_start=3)
    results(make_inputs(segments, torch.float32, HEADS, HEAD_DIM), segments, NPUAttention(fake))  # type: ignore[arg-type]
    modes = [(call["sparse_mode"], call["atten_mask"] is not None) for call in fake.calls]
    assert modes == [(3, True), (0, False)] * 2


@pytest.mark.parametrize("kernel", [CUDAAttention(), NPUAttention()], ids=["cuda", "npu"])
def test_dtype_that_the_operator_lacks_is_refused_by_name(kernel: AttentionKernel) -> None:
    tensor = torch.zeros(1, 1, 16, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"takes .*float16.*, not torch\.float64"):
        kernel.forward(tensor, tensor, tensor, Part((1,), (1,), True, CPU), 1.0)


def test_head_dimension_that_flash_attention_lacks_is_refused_by_name() -> None:
    tensor = torch.zeros(1, 1, 12, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="multiples of 8 and at most 256, not 12"):
        CUDAAttention().forward(tensor, tensor, tensor, Part((1,), (1,), True, CPU), 1.0)


def test_npu_window_is_a_band_that_ends_at_the_last_query_and_key() -> None:
    fake = FakeTorchNPU((torch.float32,))
    segments = Segments(Part((9, 2), (9, 2), True, CPU), Part((2,), (9,), False, CPU), cross_q_start=9)
    results(make_inputs(segments, torch.float32, HEADS, HEAD_DIM), segments, NPUAttention(fake), 4)  # type: ignore[arg-type]
    modes = [(call["sparse_mode"], call["atten_mask"] is not None) for call in fake.calls]
    assert modes == [(4, True)] * 2


class WithoutWindow(CPUAttention):
    """A wrong kernel: rows attend to all keys before them."""

    def forward(self, query: Any, key: Any, value: Any, part: Part, scale: float) -> Any:
        if part.window is not None:
            part = replace(part, window=10_000)
        return super().forward(query, key, value, part, scale)


def test_a_kernel_that_is_wrong_with_a_window_is_found_where_a_model_has_one() -> None:
    checked_kernel.cache_clear()
    kernel = WithoutWindow()
    assert checked_kernel(OnCPU(kernel), torch.float32, *HEADS, HEAD_DIM) is kernel
    checked = checked_kernel(OnCPU(kernel), torch.float32, *HEADS, HEAD_DIM, has_windows=True)
    assert isinstance(checked, ComposedAttention)


class OwnWindowStatistics(CPUAttention):
    """A kernel that computes the softmax of its causal rows again in backward, whatever the merged one is."""

    def backward(
        self, dout: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, part: Part, scale: float
    ) -> Any:
        if part.window is not None:
            out, lse = super().forward(query, key, value, part, scale)
        return super().backward(dout, query, key, value, out, lse, part, scale)


def test_a_kernel_that_cannot_take_sinks_is_found_where_a_model_has_them() -> None:
    checked_kernel.cache_clear()
    kernel = OwnWindowStatistics()
    assert checked_kernel(OnCPU(kernel), torch.float32, *HEADS, HEAD_DIM, has_windows=True) is kernel
    checked = checked_kernel(OnCPU(kernel), torch.float32, *HEADS, HEAD_DIM, has_windows=True, has_sinks=True)
    assert isinstance(checked, ComposedAttention)


@dataclass(frozen=True)
class OnCPU:
    """As much of a device as the check on first use takes."""

    ATTENTION: AttentionKernel
    DEVICE: torch.device = CPU


class OwnStatistics(CPUAttention):
    """A wrong kernel: its backward uses the part's own log-sum-exps and not the merged ones that it is given."""

    def backward(self, dout: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, part: Any, scale: Any) -> Any:
        out, lse = super().forward(query, key, value, part, scale)
        return super().backward(dout, query, key, value, out, lse, part, scale)


class Mute(CPUAttention):
    """A kernel that this machine cannot run."""

    def forward(self, *_: Any) -> Any:
        raise RuntimeError("no kernel image is available")


class WithoutRoom(CPUAttention):
    """A device that is full."""

    def forward(self, *_: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")


def test_a_device_without_room_for_the_check_is_no_fault_of_its_kernel() -> None:
    checked_kernel.cache_clear()
    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
        checked_kernel(OnCPU(WithoutRoom()), torch.float32, *HEADS, HEAD_DIM)


class OneBlockOfKeys(CPUAttention):
    """A wrong kernel: of each entry it sees the first 128 keys only."""

    def forward(self, query: Any, key: Any, value: Any, part: Part, scale: float) -> Any:
        return super().forward(query, key, _without_rows_from(128, value, part.kv_lens), part, scale)


class LastBlockLost(CPUAttention):
    """A wrong kernel: rows of an entry's last block, if it is no whole one, come out as 0. They are small ones."""

    def forward(self, query: Any, key: Any, value: Any, part: Part, scale: float) -> Any:
        out, lse = super().forward(query, key, value, part, scale)
        return _without_rows_from(LONG_SEGMENTS[0][0] - 1, out, part.q_lens), lse


def _without_rows_from(first: int, rows: torch.Tensor, lens: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([torch.cat([entry[:first], torch.zeros_like(entry[first:])]) for entry in rows.split(lens)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", [OneBlockOfKeys(), LastBlockLost()])
def test_kernel_that_is_wrong_beyond_a_block_is_found(kernel: AttentionKernel, dtype: torch.dtype) -> None:
    checked_kernel.cache_clear()
    assert isinstance(checked_kernel(OnCPU(kernel), dtype, *HEADS, HEAD_DIM), ComposedAttention)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (OwnStatistics(), "its relative error is"),
        (Mute(), "it failed: no kernel image"),
        (CUDAAttention(), "it failed"),
    ],
)
def test_wrong_kernel_is_replaced_with_an_error(
    kernel: AttentionKernel, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    checked_kernel.cache_clear()
    with caplog.at_level(logging.ERROR):
        stand_in = checked_kernel(OnCPU(kernel), torch.float32, *HEADS, HEAD_DIM)
        assert isinstance(stand_in, ComposedAttention)
    assert reason in caplog.text
    assert "Plain matrix products stand in" in caplog.text


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        (CPUAttention(), torch.float32),
        (cuda_kernel(torch.bfloat16), torch.bfloat16),
        (npu_kernel(torch.bfloat16), torch.bfloat16),
        (npu_kernel(torch.float32), torch.float32),
        (ComposedAttention(), torch.float32),
        (ComposedAttention(), torch.bfloat16),
    ],
    ids=["cpu", "cuda", "npu-bf16", "npu-fp32", "composed", "composed-bf16"],
)
@pytest.mark.parametrize("has_sinks", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_right_kernel_passes_the_check_on_first_use(
    kernel: AttentionKernel, dtype: torch.dtype, has_sinks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    checked_kernel.cache_clear()
    checked = checked_kernel(OnCPU(kernel), dtype, *HEADS, HEAD_DIM, has_windows=True, has_sinks=has_sinks)
    assert checked is kernel
    assert not caplog.records


class LargestTensor(TorchDispatchMode):
    """The most elements that any tensor has that is made inside."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.num_elements = max(self.num_elements, made.numel())
        return made


def test_stand_in_holds_the_scores_of_one_block_of_queries() -> None:
    num_rows = 5 * QUERY_BLOCK + 3
    part = Part((num_rows,), (num_rows,), True, CPU)
    query, key, value, dout = (torch.randn(num_rows, heads, HEAD_DIM) for heads in (6, 2, 2, 6))
    with LargestTensor() as largest:
        out, lse = ComposedAttention().forward(query, key, value, part, 1.0)
        ComposedAttention().backward(dout, query, key, value, out, lse, part, 1.0)
    assert num_rows * QUERY_BLOCK <= largest.num_elements <= 6 * num_rows * QUERY_BLOCK
