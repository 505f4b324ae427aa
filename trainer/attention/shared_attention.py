"""Shared-prompt attention without a mask: two parts per layer, merged by their log-sum-exps.

Every segment attends causally to itself (self part); response rows attend to their whole prompt (cross part). With the
parts' outputs o_s, o_c and log-sum-exps l_s, l_c, the softmax over both is

    l = logaddexp(l_s, l_c),    o = o_s + sigmoid(l_c - l_s) (o_c - o_s).

The backward pass runs each part's own flash backward with the merged o and l in place of the part's own. With P_ij =
exp(s_ij - l) and delta_i = do_i . o_i of the whole softmax, dS_ij = P_ij (do_i . v_j - delta_i) holds for every key of
either part (FlashAttention, arXiv 2205.14135, appendix B.4). So only q, k, v, o and l are saved for backward.

A layer whose rows attend to the last W tokens only is one part: a response has the last W - 1 rows of its prompt copied
before its own, and the kernel leaves out what is further away. Where W is no less than all tokens of any response and
its prompt, nothing is, and the layer is computed as above.

An attention sink is a logit s of a head that joins the softmax's denominator with a value of 0 (arXiv 2309.17453,
2508.10925): from o and l over all keys

    o' = o sigmoid(l - s),    l' = logaddexp(l, s),    ds = - sum over rows of exp(s - l') (do' . o').

It joins once, after all parts, and so needs nothing of a kernel: their backward runs with o' and l'.

Shape legend: T query rows, S key / value rows, M query rows of the cross part, H query heads, K key / value heads,
D head dimension.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from trainer.attention.segments import Segments
from trainer.devices import AttentionKernel, Device
from trainer.devices.attention_part import Part
from trainer.devices.composed_attention import ComposedAttention
from trainer.devices.layer_ops import Merge, merge

log = logging.getLogger(__name__)

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest difference of one row from the reference on unit-normal inputs, relative to the row (see `_row_error`).

In bfloat16 (unit roundoff u = 2^-8) a row is rounded several times (the probabilities, each part's output and the
merged output; or dS, each part's gradient and their sum): about 5 u = 2e-2 if none of them cancels."""

LensOfGroups: TypeAlias = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
"""Prompt lengths, and fed response lengths of each group."""

Results: TypeAlias = list[torch.Tensor]
"""Output, and gradients of query, key and value."""

SHORT_SEGMENTS: LensOfGroups = ((5, 3), ((4, 1, 7), (2, 6)))
"""Of the check on first use: fewer rows than a kernel's block."""

LONG_SEGMENTS: LensOfGroups = ((577, 64, 129), ((127, 1, 130), (65, 64), (63, 128)))
"""The same around block boundaries: flash kernels take 32 to 256 queries and 64 to 512 keys at a time."""

SHORT_WINDOWS, LONG_WINDOWS = (2, 4), (96, 512)
"""Windows of the check; with 1, queries and keys have no gradients that errors could be relative to."""

LONG_KV_HEADS = 2
"""Maximum key / value heads in the long check, each with as many query heads as in the model: limits the time."""


def shared_prompt_attention(
    query_THD: torch.Tensor,
    key_SKD: torch.Tensor,
    value_SKD: torch.Tensor,
    segments: Segments,
    scale: float,
    kernel: AttentionKernel | None,
    merge: Merge = merge,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention output [T, H, D], in the inputs' dtype, with gradients for query, key, value and sinks.

    Args:
        kernel: what `checked_kernel` chose, or None for the dense reference.
        window: tokens that a row attends to, the last ones before it and its own; None for all.
        sinks_H: a logit for each query head, of any dtype; None without sinks.
    """
    window = None if window is None or window >= segments.longest else window
    if kernel is None:
        return dense_attention(query_THD, key_SKD, value_SKD, segments, scale, window, sinks_H)
    # `apply` is untyped in torch.
    out_THD: torch.Tensor = _SharedPromptAttention.apply(  # type: ignore[no-untyped-call]
        query_THD, key_SKD, value_SKD, sinks_H, segments, scale, kernel, merge, window
    )
    return out_THD


class _SharedPromptAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_THD: torch.Tensor,
        key_SKD: torch.Tensor,
        value_SKD: torch.Tensor,
        sinks_H: torch.Tensor | None,
        segments: Segments,
        scale: float,
        kernel: AttentionKernel,
        merge: Merge,
        window: int | None,
    ) -> torch.Tensor:
        if window is None:
            out_THD, lse_HT = _two_parts(query_THD, key_SKD, value_SKD, segments, scale, kernel, merge)
        else:
            part, rows = segments.windowed(window)
            key, value = (x.index_select(0, rows) for x in (key_SKD, value_SKD))
            out_THD, lse_HT = kernel.forward(query_THD, key, value, part, scale)
        if sinks_H is not None:
            out_THD, lse_HT = _with_sinks(out_THD, lse_HT, sinks_H)
        ctx.save_for_backward(query_THD, key_SKD, value_SKD, sinks_H, out_THD, lse_HT)
        ctx.segments, ctx.scale, ctx.kernel, ctx.window = segments, scale, kernel, window
        return out_THD

    @staticmethod
    def backward(ctx: Any, dout_THD: torch.Tensor) -> Any:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        segments, scale, kernel = ctx.segments, ctx.scale, ctx.kernel
        if ctx.window is None:
            gradients = _backward_of_two_parts(dout_THD, query, key, value, out, lse, segments, scale, kernel)
        else:
            part, rows = segments.windowed(ctx.window)
            key_taken, value_taken = (x.index_select(0, rows) for x in (key, value))
            dquery, *of_taken = kernel.backward(dout_THD, query, key_taken, value_taken, out, lse, part, scale)
            # A prompt's keys have a gradient from each response that has them.
            wide = torch.promote_types(key.dtype, torch.float32)
            dkey, dvalue = (
                torch.zeros_like(x, dtype=wide).index_add_(0, rows, dx.to(wide)).to(x.dtype)
                for x, dx in zip((key, value), of_taken, strict=True)
            )
            gradients = dquery, dkey, dvalue
        dsinks = None if sinks is None else _gradient_of_sinks(dout_THD, out, lse, sinks)
        return *gradients, dsinks, None, None, None, None, None


def _with_sinks(
    out_THD: torch.Tensor, lse_HT: torch.Tensor, sinks_H: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exps with the sinks among the keys, in the wider dtype of the log-sum-exps until rounded."""
    sinks_H1 = sinks_H[:, None].to(lse_HT.dtype)
    share_TH1 = torch.sigmoid(lse_HT - sinks_H1).T[..., None]
    return (out_THD * share_TH1).to(out_THD.dtype), torch.logaddexp(lse_HT, sinks_H1)


def _gradient_of_sinks(
    dout_THD: torch.Tensor, out_THD: torch.Tensor, lse_HT: torch.Tensor, sinks_H: torch.Tensor
) -> torch.Tensor:
    """[H], in the sinks' dtype; `out_THD` and `lse_HT` are with the sinks."""
    delta_HT = (dout_THD.to(lse_HT.dtype) * out_THD).sum(-1).T
    shares_HT = torch.exp(sinks_H[:, None].to(lse_HT.dtype) - lse_HT)
    return -(shares_HT * delta_HT).sum(1).to(sinks_H.dtype)


def _two_parts(
    query_THD: torch.Tensor,
    key_SKD: torch.Tensor,
    value_SKD: torch.Tensor,
    segments: Segments,
    scale: float,
    kernel: AttentionKernel,
    merge: Merge,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exps [H, T]."""
    own = slice(segments.self_kv_start, None)
    out_THD, lse_HT = kernel.forward(query_THD, key_SKD[own], value_SKD[own], segments.self_part, scale)
    if segments.cross_part is not None:
        rows, keys = _cross_slices(segments, segments.cross_part)
        cross = kernel.forward(query_THD[rows], key_SKD[keys], value_SKD[keys], segments.cross_part, scale)
        _put_merged(merge, out_THD[rows], lse_HT[:, rows].T, cross[0], cross[1].T)
    return out_THD, lse_HT


def _backward_of_two_parts(
    dout: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    segments: Segments,
    scale: float,
    kernel: AttentionKernel,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    own = slice(segments.self_kv_start, None)
    dquery, dkey_own, dvalue_own = kernel.backward(
        dout, query, key[own], value[own], out, lse, segments.self_part, scale
    )
    dkey, dvalue = _grown(dkey_own, key), _grown(dvalue_own, value)
    if segments.cross_part is not None:
        rows, keys = _cross_slices(segments, segments.cross_part)
        dquery_M, dkey_P, dvalue_P = kernel.backward(
            dout[rows], query[rows], key[keys], value[keys], out[rows], lse[:, rows], segments.cross_part, scale
        )
        dquery[rows] += dquery_M
        dkey[keys] += dkey_P
        dvalue[keys] += dvalue_P
    return dquery, dkey, dvalue


def _cross_slices(segments: Segments, part: Part) -> tuple[slice, slice]:
    start = segments.cross_q_start
    return slice(start, start + sum(part.q_lens)), slice(0, sum(part.kv_lens))


def _put_merged(
    merge: Merge, out_MHD: torch.Tensor, lse_MH: torch.Tensor, cross_out_MHD: torch.Tensor, cross_lse_MH: torch.Tensor
) -> None:
    merged_MHD, merged_MH = merge(out_MHD, lse_MH, cross_out_MHD, cross_lse_MH)
    out_MHD.copy_(merged_MHD)
    lse_MH.copy_(merged_MH)


def _grown(own: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Gradients of the last rows of `like`, with zeros for the rows before them."""
    if len(own) == len(like):
        return own
    return torch.cat([own.new_zeros(len(like) - len(own), *own.shape[1:]), own])


@functools.cache
def checked_kernel(
    device: Device,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    has_windows: bool = False,
    has_sinks: bool = False,
) -> AttentionKernel:
    """The device's kernel, or `ComposedAttention` (with an error in the log) if its results differ from the reference.

    Compares output and gradients of two ragged micro-batches on first use of each device, dtype and head layout: a
    short one with all heads, and one of many blocks with few heads; with `has_windows` also of layers with windows,
    with `has_sinks` all with sinks.

    Raises:
        torch.OutOfMemoryError: the device has no room for the check, which says nothing of the kernel.
    """
    kernel = device.ATTENTION
    few = min(num_kv_heads, LONG_KV_HEADS)
    checks = (
        (SHORT_SEGMENTS, SHORT_WINDOWS, num_heads, num_kv_heads),
        (LONG_SEGMENTS, LONG_WINDOWS, few * (num_heads // num_kv_heads), few),
    )
    try:
        error = max(
            _largest_error(
                kernel,
                device.DEVICE,
                dtype,
                lens,
                window,
                (q_heads, kv_heads, head_dim),
                has_sinks=has_sinks,
            )
            for lens, windows, q_heads, kv_heads in checks
            for window in ((None, *windows) if has_windows else (None,))
        )
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, TypeError, AttributeError) as problem:
        reason = f"it failed: {problem}"
    else:
        if error <= TOLERANCES[dtype]:
            return kernel
        reason = f"its relative error is {error:.1e}, allowed is {TOLERANCES[dtype]:.1e}"
    log.error(
        "the shared-prompt attention kernel of device %s is not used for %s with %d heads, %d key / value heads of "
        "dimension %d: %s. Plain matrix products stand in: correct, but slower",
        *(device.DEVICE.type, dtype, num_heads, num_kv_heads, head_dim, reason),
    )
    return ComposedAttention()


def _largest_error(
    kernel: AttentionKernel,
    device: torch.device,
    dtype: torch.dtype,
    lens: LensOfGroups,
    window: int | None,
    sizes: tuple[int, int, int],
    *,
    has_sinks: bool,
) -> float:
    """`sizes`: query heads, key / value heads, head dimension."""
    num_heads, num_kv_heads, head_dim = sizes
    segments = _check_segments(lens, device)
    generator = torch.Generator().manual_seed(0)
    heads = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    inputs = [
        torch.randn(segments.num_rows, n, head_dim, generator=generator, dtype=torch.float64).to(device, dtype)
        for n in heads
    ]
    scale = head_dim**-0.5
    sinks_H = torch.randn(num_heads, generator=generator).to(device) if has_sinks else None

    def results_of(kernel: AttentionKernel | None, segments: Segments, inputs: Sequence[torch.Tensor]) -> Results:
        query, key, value, dout = (tensor.detach().requires_grad_() for tensor in inputs)
        with torch.enable_grad():
            out = shared_prompt_attention(query, key, value, segments, scale, kernel, window=window, sinks_H=sinks_H)
        return [out.detach(), *torch.autograd.grad(out, (query, key, value), dout.detach())]

    actual = results_of(kernel, segments, inputs)
    # No row attends to another group's: the dense reference, quadratic in the rows, is computed group by group.
    wide = [tensor.to(torch.float32 if dtype == torch.bfloat16 else dtype) for tensor in inputs]
    expected = [torch.empty_like(tensor) for tensor in (wide[3], *wide[:3])]
    for group, rows in zip(zip(*lens, strict=True), _rows_of_groups(lens, device), strict=True):
        one = _check_segments(((group[0],), (group[1],)), device)
        for whole, part in zip(expected, results_of(None, one, [tensor[rows] for tensor in wide]), strict=True):
            whole[rows] = part
    return max(map(_row_error, actual, expected))


def _rows_of_groups(lens: LensOfGroups, device: torch.device) -> list[torch.Tensor]:
    """The rows of each group's prompt and responses, in the order of a micro-batch of that group alone."""
    prompts, responses = lens
    num_rows = [*prompts, *map(sum, responses)]
    parts = torch.arange(sum(num_rows), device=device).split(num_rows)
    return [torch.cat([parts[i], parts[len(prompts) + i]]) for i in range(len(prompts))]


def _row_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of one row, relative to its norm, or to the median norm where the row's is smaller.

    Relative to the largest value of all rows, errors in late rows would be hidden: a mean over a thousand keys is
    thirty times smaller than the first row's single value.
    """
    norms = expected.flatten(1).norm(dim=1)
    differences = (actual.to(expected.dtype) - expected).flatten(1).norm(dim=1)
    error = (differences / norms.clamp(min=norms.median())).max()
    return float(error.nan_to_num(torch.inf))


def _check_segments(lens_of_groups: LensOfGroups, device: torch.device) -> Segments:
    prompts, responses = lens_of_groups
    lens = (*prompts, *(length for group in responses for length in group))
    cross = Part(tuple(sum(group) for group in responses), prompts, False, device)
    return Segments(Part(lens, lens, True, device), cross, cross_q_start=sum(prompts))


def dense_attention(
    query_THD: torch.Tensor,
    key_SKD: torch.Tensor,
    value_SKD: torch.Tensor,
    segments: Segments,
    scale: float,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention output [T, H, D] under the dense mask of `segments`; time and memory are quadratic in the row count."""
    mask_TS = segments.dense_mask_TS if window is None else segments.dense_window_mask_TS(window)
    if sinks_H is not None:
        # A key of its own for each head, which has any product with a query, before all others, and no value.
        num_rows, num_heads, _ = query_THD.shape
        key_SHD, value_SHD = (x.repeat_interleave(num_heads // x.shape[1], 1) for x in (key_SKD, value_SKD))
        scores_HTS = torch.einsum("thd,shd->hts", query_THD, key_SHD) * scale
        scores_HTS = scores_HTS.masked_fill(~mask_TS, -torch.inf)
        sinks_HT1 = sinks_H.to(query_THD.dtype)[:, None, None].expand(-1, num_rows, 1)
        shares_HTS = torch.cat([sinks_HT1, scores_HTS], -1).softmax(-1)[..., 1:]
        return torch.einsum("hts,shd->thd", shares_HTS, value_SHD)
    out_1HTD = F.scaled_dot_product_attention(
        query_THD.transpose(0, 1)[None],
        key_SKD.transpose(0, 1)[None],
        value_SKD.transpose(0, 1)[None],
        attn_mask=mask_TS,
        scale=scale,
        enable_gqa=True,
    )
    return out_1HTD[0].transpose(0, 1)
