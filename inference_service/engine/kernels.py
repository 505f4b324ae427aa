"""How attention of a step is computed: by torch's kernels as they are, or so that no row depends on those beside it.

Shapes: B entries, H heads, K key-value heads, Q queries, L keys, D head size.
"""

from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from async_rl.shared.cpu import exact

MASKED: Final = exact.MASKED

Width: TypeAlias = Callable[[int], int]
Attended: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Outputs [B, H, Q, D] and log-sum-exps [B, H, Q]."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass(frozen=True, slots=True)
class Kernels:
    """`attend`, `attend_from` and `merge` have the arguments of the functions here; `width` is the number of keys that
    attention over some number of them reads."""

    width: Width
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float], Attended]
    attend_from: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, float], Attended]
    merge: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Attended]
    is_exact: bool = False

    @property
    def row_multiple(self) -> int:
        """Of the rows in products of matrices."""
        return exact.ROW_MULTIPLE if self.is_exact else 1


def merge(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint sets of keys, from the outputs [..., D] and log-sum-exps [...] over each."""
    weight = torch.sigmoid(other_lse - lse).unsqueeze(-1)
    merged = torch.lerp(out.to(weight.dtype), other.to(weight.dtype), weight)
    return merged.to(out.dtype), torch.logaddexp(lse, other_lse)


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [B, K, Q, D] and log-sum-exps [B, K, Q] of `query` [B, K, Q, D] over all keys [B, K, L, D]."""
    query = query.to(keys.dtype)
    if query.device.type == "cpu":
        if bias is not None and bias.shape[2] not in (1, query.shape[2]):
            bias = bias.repeat_interleave(query.shape[2] // bias.shape[2], dim=2)
        out, lse = _flash(query, keys, values, 0.0, False, attn_mask=bias, scale=scaling)
        return out, lse
    scores = (query @ keys.transpose(-1, -2)).float() * scaling
    if bias is not None:
        scores = scores + bias.repeat_interleave(query.shape[2] // bias.shape[2], dim=2)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp().to(values.dtype) @ values, lse


def attend_causally(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attend`, with as many queries as keys, each over the keys up to its own; as many heads of both."""
    if query.device.type == "cpu":
        out, lse = _flash(query, keys, values, 0.0, True, scale=scaling)
        return out, lse
    num = query.shape[2]
    bias = torch.full((num, num), MASKED, device=query.device).triu(1)
    return attend(query, keys, values, bias[None, None], scaling)


def attend_from(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, scaling: float) -> Attended:
    """As `attend`, each query [1, H, Q, D] over the keys [1, K, L, D] up to its own: they are those from `start` on."""
    num_heads, num_queries = query.shape[1:3]
    per_kv = num_heads // keys.shape[1]
    new_keys, new_values = (
        x[:, :, start : start + num_queries].repeat_interleave(per_kv, dim=1) for x in (keys, values)
    )
    out, lse = attend_causally(query, new_keys, new_values, scaling)
    if not start:
        return out, lse
    other, other_lse = attend(group_rows(query, keys), keys[:, :, :start], values[:, :, :start], None, scaling)
    return merge(out, lse, other.reshape(out.shape), other_lse.reshape(lse.shape))


def group_rows(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Queries [1, H, Q, D] with those of the heads that share keys [1, K, L, D] as rows, [1, K, H / K * Q, D]."""
    return query.reshape(1, keys.shape[1], -1, query.shape[3])


def length_bias(lengths: Listing[int], longest: int, device: torch.device) -> torch.Tensor | None:
    """[N, 1, 1, longest]: keys after a length are excluded; None if there are none."""
    if all(length == longest for length in lengths):
        return None
    inside = torch.arange(longest, device=device) < torch.tensor(lengths, device=device).unsqueeze(-1)
    return torch.zeros(inside.shape, device=device).masked_fill_(~inside, MASKED)[:, None, None, :]


FASTEST: Final = Kernels(int, attend, attend_from, merge)
EXACT: Final = Kernels(exact.key_width, exact.attend, exact.attend_from, exact.merge, True)
