"""Operations whose result for a row is the same bits whatever is computed beside it: float32, on a CPU.

The trainer runs a prompt and its responses as rows of one micro-batch; the embedded engine runs the same tokens in
pieces, beside other ones. Log-probs are equal bit for bit if each output element is made by the same sequence of
operations in both. torch's kernels on a CPU do that under these conditions, measured on AMD processors with AVX-512 and
with AVX2, with torch 2.13 (MKL 2024.2):

- a product of matrices, if its number of rows is a multiple of `ROW_MULTIPLE` and its number of columns one of
  `COLUMN_MULTIPLE`: one to three rows, and one to eleven columns, take other kernels, and threads divide other numbers
  into such. oneDNN does it for all but one row, but its sums are not MKL's above `STRAIGHT` terms: both sides use MKL;
- flash attention, if queries come in multiples of `ROW_MULTIPLE` and keys in widths of `key_width`: MKL adds up to
  `STRAIGHT` products in one chain and divides longer sums by their length; vectors have `VECTOR` elements, and the rest
  of a row takes scalar code. Keys beyond a query's own are masked: exp gives 0, and adding 0 changes nothing;
- exp, log, sqrt, sin, cos, sums along rows, and what IEEE 754 defines (+, -, *, /, max). Not sigmoid, silu and
  logaddexp, whose vectorized and scalar versions differ: they are written with exp, log and division;
- a bias that is added last: torch starts some sums with it.

Shapes: B entries, H query heads, K key-value heads, Q queries, L keys, D head size, R rows, V vocabulary, F the size
of feed-forward parts.
"""

from typing import Any, Final

import torch
import torch.nn.functional as F

ROW_MULTIPLE: Final = 4
COLUMN_MULTIPLE: Final = 16
VECTOR: Final = 16
STRAIGHT: Final = 192
KEY_BLOCK: Final = 512
"""Keys that flash attention takes at a time: softmax is computed block by block."""

MASKED: Final = -1e38
"""Added to the scores of keys that are excluded."""

MASS_BLOCK: Final = 128
"""Tokens whose weights are summed in float32; the sums are added in float64."""

TAKES_UNEQUAL_HEADS: Final = torch.__version__ >= "2.9"  # compared as versions, not as text
"""Whether flash attention takes fewer key-value heads than query heads (see `trainer/devices/cpu_attention.py`)."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def key_width(num_keys: int) -> int:
    """The number of keys, with padding, that attention over `num_keys` of them is computed with."""
    whole, rest = divmod(num_keys, KEY_BLOCK)
    return whole * KEY_BLOCK + (_padded(rest, VECTOR) if rest <= STRAIGHT else KEY_BLOCK)


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [B, H, Q, D] and log-sum-exps [B, H, Q] of `query` [B, H, Q, D] over all keys [B, K, L, D].

    L is a `key_width`; `bias`, [B, 1, Q or 1, L] or with fewer rows that divide Q, excludes what is padding.
    """
    num_queries, padding = query.shape[2], -query.shape[2] % ROW_MULTIPLE
    if bias is not None and bias.shape[2] not in (1, num_queries):
        bias = bias.repeat_interleave(num_queries // bias.shape[2], dim=2)
    if padding:
        query = F.pad(query, (0, 0, 0, padding))
        if bias is not None and bias.shape[2] != 1:
            bias = F.pad(bias, (0, 0, 0, padding))
    keys, values = _as_often(query, keys), _as_often(query, values)
    out, lse = _flash(query, keys, values, 0.0, False, attn_mask=bias, scale=scaling)
    return (out[:, :, :num_queries], lse[:, :, :num_queries]) if padding else (out, lse)


def attend_from(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attend`, each query over the keys up to its own: they are those at `start` and after it.

    `keys` and `values` have at least `key_width(start + Q)` rows, of which the last ones may be anything finite.
    """
    stop = start + query.shape[2]
    outs, lses = [], []
    begin = start
    while begin < stop:
        end = min(stop, _range_end(begin))
        width = key_width(end)
        some, own_keys, own_values = query[:, :, begin - start : end - start], keys[:, :, :width], values[:, :, :width]
        if begin == 0:
            out, lse = _attend_causally(some, own_keys, own_values, scaling)
        else:
            rows = torch.arange(begin, end, device=query.device)
            is_later = torch.arange(width, device=query.device) > rows[:, None]
            bias = torch.zeros(is_later.shape, device=query.device).masked_fill_(is_later, MASKED)
            out, lse = attend(some, own_keys, own_values, bias[None, None], scaling)
        outs.append(out)
        lses.append(lse)
        begin = end
    return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs, dim=2), torch.cat(lses, dim=2))


def merge(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint sets of keys, from the outputs [..., D] and log-sum-exps [...] over each."""
    highest = torch.maximum(lse, other_lse)
    share, other_share = (lse - highest).exp_(), (other_lse - highest).exp_()
    total = share + other_share
    weight = (other_share / total).unsqueeze(-1)
    return (other - out).mul_(weight).add_(out), total.log_().add_(highest)


def linear(x: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None = None) -> torch.Tensor:
    """Products of rows, [..., H], with the rows of a weight, [..., V], without gradient.

    The bias is added to the whole product, as in Megatron's layers; torch's own starts some sums with it.
    """
    rows_RH = x.flatten(0, -2)
    num_rows, num_columns = len(rows_RH), len(weight_VH)
    padding, rest = -num_rows % ROW_MULTIPLE, num_columns % COLUMN_MULTIPLE
    if padding:
        rows_RH = F.pad(rows_RH, (0, 0, 0, padding))
    if rest:
        whole = num_columns - rest
        out_RV = rows_RH.new_empty(len(rows_RH), num_columns)
        torch.mm(rows_RH, weight_VH[:whole].T, out=out_RV[:, :whole])
        last = F.pad(weight_VH[whole:], (0, 0, 0, COLUMN_MULTIPLE - rest))
        out_RV[:, whole:] = (rows_RH @ last.T)[:, :rest]
    else:
        out_RV = rows_RH @ weight_VH.T
    if bias_V is not None:
        out_RV += bias_V
    return out_RV[:num_rows].view(*x.shape[:-1], num_columns)


def matmul(left_MK: torch.Tensor, right_KN: torch.Tensor) -> torch.Tensor:
    """The product of rows with a matrix, as `linear` computes it."""
    return linear(left_MK, right_KN.T)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; transformers' order of operations."""
    return F.rms_norm(x, weight.shape, weight, eps)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x)), without gradient."""
    return x / x.neg().exp_().add_(1.0)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half, of [..., 2F] -> [..., F]."""
    # `apply` is untyped in torch.
    made: torch.Tensor = _SwiGLU.apply(x)  # type: ignore[no-untyped-call]
    return made


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        dx = torch.empty_like(x)
        dgate, dup = dx.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grad, out=dup)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=dgate)
        return dx


def block_masses(weights_RV: torch.Tensor) -> torch.Tensor:
    """Sums of `MASS_BLOCK` consecutive weights, float64 [R, blocks]; the last block may be shorter."""
    num_whole = weights_RV.shape[-1] // MASS_BLOCK * MASS_BLOCK
    masses = []
    if num_whole:
        masses.append(weights_RV[:, :num_whole].unflatten(-1, (-1, MASS_BLOCK)).sum(dim=-1))
    if num_whole < weights_RV.shape[-1]:
        masses.append(weights_RV[:, num_whole:].sum(dim=-1, keepdim=True))
    # MPS and some NPUs have no float64; the engine runs only where it exists (CPU, CUDA).
    return torch.cat(masses, dim=-1).double()


def log_normalizer(highest_R1: torch.Tensor, masses_RB: torch.Tensor) -> torch.Tensor:
    """log sum exp of logits, float32 [R, 1], from each row's highest and the masses of exp(logit - highest)."""
    return highest_R1 + masses_RB.sum(dim=-1, keepdim=True).log().to(highest_R1.dtype)


def log_normalizer_of(logits_RV: torch.Tensor) -> torch.Tensor:
    """log sum exp of each row, [R, 1], as the embedded engine computes it."""
    highest_R1 = logits_RV.amax(dim=-1, keepdim=True)
    return log_normalizer(highest_R1, block_masses((logits_RV - highest_R1).exp_()))


def _attend_causally(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend_from` 0 for the first `STRAIGHT` queries at most."""
    num_queries, padding = query.shape[2], keys.shape[2] - query.shape[2]
    query = F.pad(query, (0, 0, 0, padding)) if padding else query
    out, lse = _flash(query, _as_often(query, keys), _as_often(query, values), 0.0, True, scale=scaling)
    return out[:, :, :num_queries], lse[:, :, :num_queries]


def _range_end(begin: int) -> int:
    """The end of the queries that can be computed with the same width as the one at `begin`."""
    whole, rest = divmod(begin, KEY_BLOCK)
    return whole * KEY_BLOCK + (STRAIGHT if rest < STRAIGHT else KEY_BLOCK)


def _as_often(query: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if TAKES_UNEQUAL_HEADS or x.shape[1] == query.shape[1]:
        return x
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _padded(number: int, multiple: int) -> int:
    return number + -number % multiple
