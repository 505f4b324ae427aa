"""A substitute for torch_npu's training operators: their documented behaviour, computed in plain PyTorch on a CPU.

Semantics and errors are those of the pages torch_npu-npu_fusion_attention.md, -npu_rms_norm.md, -npu_swiglu.md and
-npu_rotary_mul.md in Ascend/op-plugin (docs/zh/custom_APIs/torch_npu), for the TND layout and the other features used
here. It also refuses inputs for which the operators would silently compute something else. Results are computed in
float64 and rounded to the dtypes of the operators.

Shape legend: T query rows, S key / value rows of one sequence, N query heads, K key / value heads, D head dimension.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

UNLIMITED = 2147483647
MAX_ENTRIES = 1024
COPIES = 8


@dataclass(eq=False)
class FakeTorchNPU:
    """An object with the operators, for use in place of the module.

    `dtypes` are those that attention accepts; if float64 is among them, its statistics are float64 too, for tests more
    precise than the operator. `calls` lists how attention was called, forward and backward.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32)

    def __post_init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def npu_fusion_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        head_num: int,
        input_layout: str,
        pse: None = None,
        padding_mask: None = None,
        atten_mask: torch.Tensor | None = None,
        scale: float = 1.0,
        keep_prob: float = 1.0,
        pre_tockens: int = UNLIMITED,
        next_tockens: int = UNLIMITED,
        inner_precise: int = 0,
        prefix: None = None,
        actual_seq_qlen: Sequence[int] | None = None,
        actual_seq_kvlen: Sequence[int] | None = None,
        sparse_mode: int = 0,
        gen_mask_parallel: bool = True,
        sync: bool = False,
        softmax_layout: str = "",
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
        """(output, row maxima [T, N, 8], row sums [T, N, 8], reserved, seed, offset, length)."""
        self._require(query, key, value, head_num, input_layout, pse, padding_mask, keep_prob, prefix, softmax_layout)
        out = torch.zeros(*query.shape[:2], value.shape[2], dtype=torch.float64)
        maximum, total = torch.zeros(2, *query.shape[:2], dtype=torch.float64)
        for q, kv in self._sequences(query, key, actual_seq_qlen, actual_seq_kvlen):
            scores_NTS = _scores(query[q], key[kv], scale)
            scores_NTS.masked_fill_(_masked(scores_NTS, atten_mask, sparse_mode, pre_tockens, next_tockens), -torch.inf)
            maximum[q] = scores_NTS.amax(-1).T
            exp_NTS = (scores_NTS - scores_NTS.amax(-1, keepdim=True)).exp()
            total[q] = exp_NTS.sum(-1).T
            probs_NTS = exp_NTS / exp_NTS.sum(-1, keepdim=True)
            out[q] = torch.einsum("nts,snd->tnd", probs_NTS, _expanded(value[kv], head_num))
        self.calls.append({"sparse_mode": sparse_mode, "atten_mask": atten_mask, "entries": len(actual_seq_qlen or ())})
        maxima, sums = (
            _to_layout(x, softmax_layout, actual_seq_qlen).to(_statistics_dtype(query))[..., None].repeat(1, 1, COPIES)
            for x in (maximum, total)
        )
        return out.to(query.dtype), maxima, sums, torch.empty(0), 0, 0, 0

    def npu_fusion_attention_grad(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dy: torch.Tensor,
        head_num: int,
        input_layout: str,
        *,
        pse: None = None,
        padding_mask: None = None,
        atten_mask: torch.Tensor | None = None,
        softmax_max: torch.Tensor,
        softmax_sum: torch.Tensor,
        softmax_in: torch.Tensor | None = None,
        attention_in: torch.Tensor,
        scale_value: float = 1.0,
        keep_prob: float = 1.0,
        pre_tockens: int = UNLIMITED,
        next_tockens: int = UNLIMITED,
        inner_precise: int = 0,
        seed: int = 0,
        offset: int = 0,
        numels: int = 0,
        prefix: None = None,
        actual_seq_qlen: Sequence[int] | None = None,
        actual_seq_kvlen: Sequence[int] | None = None,
        sparse_mode: int = 0,
        gen_mask_parallel: bool = True,
        sync: bool = False,
        softmax_layout: str = "",
    ) -> tuple[torch.Tensor, ...]:
        """(dquery, dkey, dvalue, two empty tensors), from the given statistics and output."""
        self._require(query, key, value, head_num, input_layout, pse, padding_mask, keep_prob, prefix, softmax_layout)
        _check(dy.shape == query.shape == attention_in.shape, "dy and attention_in need query's shape")
        statistics: list[torch.Tensor] = []
        for name, x in (("softmax_max", softmax_max), ("softmax_sum", softmax_sum)):
            _check(x.shape == (*query.shape[:2], COPIES), f"{name} has shape {tuple(x.shape)}")
            _check(x.dtype == _statistics_dtype(query), f"{name} is {x.dtype}")
            _check(x.is_contiguous(), f"{name} is read as dense memory")
            statistics.append(_from_layout(x[..., 0], softmax_layout, actual_seq_qlen).double())
        grads = [torch.zeros(x.shape, dtype=torch.float64) for x in (query, key, value)]
        for q, kv in self._sequences(query, key, actual_seq_qlen, actual_seq_kvlen):
            scores_NTS = _scores(query[q], key[kv], scale_value)
            scores_NTS.masked_fill_(_masked(scores_NTS, atten_mask, sparse_mode, pre_tockens, next_tockens), -torch.inf)
            maximum_NT1, total_NT1 = (x[q].T[..., None] for x in statistics)
            probs_NTS = (scores_NTS - maximum_NT1).exp() / total_NT1
            _add_gradients(grads, q, kv, probs_NTS, query, key, value, dy, attention_in, scale_value)
        self.calls.append({"sparse_mode": sparse_mode, "atten_mask": atten_mask, "entries": len(actual_seq_qlen or ())})
        return *(grad.to(query.dtype) for grad in grads), torch.empty(0), torch.empty(0)

    def npu_rms_norm(
        self, input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalised input, reciprocal root mean square in float32)."""
        _check(gamma.dtype in (input.dtype, torch.float32), f"gamma is {gamma.dtype} and input {input.dtype}")
        _check(gamma.shape == input.shape[-gamma.dim() :], "gamma needs the last dimensions of input")
        rstd = (input.float().pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
        return (input.float() * rstd * gamma.float()).to(input.dtype), rstd

    def npu_swiglu(self, input: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """silu(first half) * second half."""
        _check(input.numel() > 0 and input.is_contiguous(), "input must be contiguous and not empty")
        _check(input.shape[dim] % 2 == 0, f"dimension {dim} of input is odd")
        first, second = input.chunk(2, dim)
        return F.silu(first) * second

    def npu_grouped_matmul(
        self,
        x: list[torch.Tensor],
        weight: list[torch.Tensor],
        *,
        bias: None = None,
        group_list: torch.Tensor,
        split_item: int = 0,
        group_type: int,
        group_list_type: int = 0,
    ) -> list[torch.Tensor]:
        """Without a derivative, as the real one; `group_list` has cumulative sizes."""
        assert bias is None and split_item in (2, 3) and group_list_type == 0
        (x1,), (w1,) = x, weight
        _check(group_list.dtype == torch.int64, "group_list must be int64")
        _check(x1.dtype == w1.dtype, "x and weight must have the same dtype")
        ends = group_list.tolist()
        groups = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        with torch.no_grad():
            if group_type == 0:
                _check(
                    (x1.dim(), w1.dim()) == (2, 3) and ends[-1] == len(x1), "group_type 0 takes [N, K] and [E, K, M]"
                )
                return [torch.cat([x1[rows] @ w1[e] for e, rows in enumerate(groups)])]
            _check(group_type == 2, f"group_type {group_type}")
            _check((x1.dim(), w1.dim()) == (2, 2) and ends[-1] == len(w1), "group_type 2 takes [M, N] and [N, K]")
            _check(x1.stride(0) == 1, "group_type 2 takes x as a transposed view")
            return [torch.stack([x1[:, rows] @ w1[rows] for rows in groups])]

    def npu_rotary_mul(
        self, input: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str = "half"
    ) -> torch.Tensor:
        """input r1 + rotate(input) r2 over 3 dimensions, TND with T1D or TND factors."""
        _check(input.dim() == 3 and input.shape[-1] % 2 == 0 and input.shape[-1] < 896, f"input {tuple(input.shape)}")
        allowed = (input.shape, (len(input), 1, input.shape[-1]))
        _check(r1.shape in allowed and r2.shape in allowed, f"r1 {tuple(r1.shape)}, r2 {tuple(r2.shape)}")
        _check(rotary_mode == "half", f"rotary_mode {rotary_mode!r} is not part of this stand-in")
        first, second = input.chunk(2, -1)
        return (input * r1 + torch.cat((-second, first), -1) * r2).to(input.dtype)

    def _require(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        head_num: int,
        input_layout: str,
        pse: None,
        padding_mask: None,
        keep_prob: float,
        prefix: None,
        softmax_layout: str,
    ) -> None:
        _check(input_layout == "TND", f"input_layout {input_layout!r} is not part of this stand-in")
        _check(softmax_layout in ("", "TND"), f"softmax_layout {softmax_layout!r}: only 'TND' is taken")
        _check(pse is None and padding_mask is None and prefix is None and keep_prob == 1.0, "unsupported options")
        _check(query.dtype == key.dtype == value.dtype and query.dtype in self.dtypes, f"dtype {query.dtype}")
        _check(
            query.dim() == key.dim() == 3 and key.shape == value.shape, "TND takes [T, N, D] and equal key and value"
        )
        _check(query.shape[1] == head_num <= 256, f"head_num {head_num} for {query.shape[1]} heads")
        _check(head_num % key.shape[1] == 0 and query.shape[2] == key.shape[2] <= 768, "heads or head dimension")
        _check(all(x.is_contiguous() for x in (query, key, value)), "query, key and value must be contiguous")

    def _sequences(
        self, query: torch.Tensor, key: torch.Tensor, q_ends: Sequence[int] | None, kv_ends: Sequence[int] | None
    ) -> Iterator[tuple[slice, slice]]:
        """Query and key rows of each sequence; trailing sequences of length zero are ignored, their rows stay 0."""
        for name, ends, rows in (("actual_seq_qlen", q_ends, len(query)), ("actual_seq_kvlen", kv_ends, len(key))):
            _check(isinstance(ends, list | tuple) and len(ends) > 0, f"{name} must be a list of ints, not {type(ends)}")
            assert ends is not None
            _check(all(type(end) is int for end in ends), f"{name} must be Python ints")
            _check(len(ends) <= MAX_ENTRIES, f"{name} has {len(ends)} entries, at most {MAX_ENTRIES} are taken")
            _check(max(ends) <= rows, f"{name} ends at {max(ends)}, there are {rows} rows")
        assert q_ends is not None and kv_ends is not None
        _check(len(q_ends) == len(kv_ends), f"{len(q_ends)} query and {len(kv_ends)} key lengths")
        used = [list(ends) for ends in (q_ends, kv_ends)]
        while used[0] and used[0][-1] == used[1][-1] == 0:
            used = [ends[:-1] for ends in used]
        starts = [pairwise([0, *ends]) for ends in used]
        for q, kv in zip(*starts, strict=True):
            _check(q[0] <= q[1] and kv[0] <= kv[1], "lengths must be cumulative")
            _check((q[0] == q[1]) <= (q[1] > 0), "a leading 0 is an empty sequence: leave it out")
            _check(q[0] == q[1] or kv[0] < kv[1], "queries without any key")
            if q[0] < q[1]:
                yield slice(*q), slice(*kv)


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(f"npu operator: {message}")


def _statistics_dtype(query: torch.Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _expanded(x_SKD: torch.Tensor, num_heads: int) -> torch.Tensor:
    return x_SKD.double().repeat_interleave(num_heads // x_SKD.shape[1], dim=1)


def _scores(query_TND: torch.Tensor, key_SKD: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.einsum("tnd,snd->nts", query_TND.double(), _expanded(key_SKD, query_TND.shape[1])) * scale


def _masked(scores_NTS: torch.Tensor, mask: torch.Tensor | None, mode: int, before: int, after: int) -> torch.Tensor:
    """bool [T, S], True where the key is masked out. Without a mask nothing is masked, whatever the mode."""
    num_q, num_kv = scores_NTS.shape[1:]
    _check(mode in (0, 1, 2, 3, 4), f"sparse_mode {mode} is not part of this stand-in (TND takes 0..4, 6..8)")
    if mask is None:
        return torch.zeros(num_q, num_kv, dtype=torch.bool)
    _check(mask.dtype in (torch.bool, torch.uint8), f"atten_mask is {mask.dtype}")
    column, row = torch.arange(num_kv), torch.arange(num_q)[:, None]
    if mode in (0, 1):
        _check(mask.dim() == 2 and mask.shape[0] >= num_q and mask.shape[1] >= num_kv, f"mask {tuple(mask.shape)}")
        masked = mask[:num_q, :num_kv].bool()
        if mode == 0:
            masked = masked | (column > row + after) | (column < row - before)
    else:
        _check(mask.shape == (2048, 2048), f"sparse_mode {mode} takes the 2048 x 2048 mask, not {tuple(mask.shape)}")
        _check(_is_strictly_upper(mask), "the mask is not strictly upper")
        diagonal = row if mode == 2 else row + num_kv - num_q
        masked = column > (diagonal + after if mode == 4 else diagonal)
        if mode == 4:
            masked = masked | (column < diagonal - before)
    _check(not bool(masked.all(-1).any()), f"a row without any key ({num_q} queries, {num_kv} keys, mode {mode})")
    return masked


_known_masks: dict[int, tuple[torch.Tensor, bool]] = {}


def _is_strictly_upper(mask: torch.Tensor) -> bool:
    # Checked once per mask: it is the same one in every call.
    if id(mask) not in _known_masks:
        _known_masks[id(mask)] = mask, torch.equal(mask.bool(), torch.ones(2048, 2048).triu(1).bool())
    return _known_masks[id(mask)][1]


def _to_layout(x_TN: torch.Tensor, layout: str, q_ends: Sequence[int] | None) -> torch.Tensor:
    """By default values are ordered head by head within a sequence, sequence by sequence, under the shape [T, N]."""
    if layout == "TND":
        return x_TN
    assert q_ends is not None
    return torch.cat([x_TN[slice(*rows)].T.flatten() for rows in pairwise([0, *q_ends])]).view(x_TN.shape)


def _from_layout(x_TN: torch.Tensor, layout: str, q_ends: Sequence[int] | None) -> torch.Tensor:
    if layout == "TND":
        return x_TN
    assert q_ends is not None
    lens = [end - start for start, end in pairwise([0, *q_ends])]
    parts = x_TN.flatten().split([length * x_TN.shape[1] for length in lens])
    return torch.cat([part.view(x_TN.shape[1], -1).T for part in parts])


def _add_gradients(
    grads: list[torch.Tensor],
    q: slice,
    kv: slice,
    probs_NTS: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dy: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> None:
    num_heads = query.shape[1]
    dy_TND = dy[q].double()
    delta_NT1 = (dy_TND * out[q].double()).sum(-1).T[..., None]
    dprobs_NTS = torch.einsum("tnd,snd->nts", dy_TND, _expanded(value[kv], num_heads))
    dscores_NTS = probs_NTS * (dprobs_NTS - delta_NT1) * scale
    grads[0][q] += torch.einsum("nts,snd->tnd", dscores_NTS, _expanded(key[kv], num_heads))
    for grad, per_head in (
        (grads[1], torch.einsum("nts,tnd->snd", dscores_NTS, query[q].double())),
        (grads[2], torch.einsum("nts,tnd->snd", probs_NTS, dy_TND)),
    ):
        grad[kv] += per_head.unflatten(1, (grad.shape[1], -1)).sum(2)
