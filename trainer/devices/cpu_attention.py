"""Flash attention over packed sequences on a CPU, by PyTorch's own CPU kernel.

Shape legend: M query rows, S key / value rows, H query heads, K key / value heads, D head dimension, L rows of one entry;
1 is the kernel's batch dimension.
"""

from itertools import accumulate, pairwise

import torch

from trainer.shared_prompt import Part

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CPUAttention:
    """One kernel call per entry."""

    def forward(
        self, query_MHD: torch.Tensor, key_SKD: torch.Tensor, value_SKD: torch.Tensor, part: Part, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out_MHD = torch.empty_like(query_MHD, memory_format=torch.contiguous_format)
        lse_HM = query_MHD.new_empty(query_MHD.shape[1], query_MHD.shape[0])
        for q, kv in _entries(part):
            out, lse = _flash(
                *_batched(query_MHD[q], key_SKD[kv], value_SKD[kv]), dropout_p=0.0, is_causal=part.causal, scale=scale
            )
            out_MHD[q] = out[0].transpose(0, 1)
            lse_HM[:, q] = lse[0]
        return out_MHD, lse_HM

    def backward(
        self,
        dout_MHD: torch.Tensor,
        query_MHD: torch.Tensor,
        key_SKD: torch.Tensor,
        value_SKD: torch.Tensor,
        out_MHD: torch.Tensor,
        lse_HM: torch.Tensor,
        part: Part,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query_MHD, key_SKD, value_SKD)]
        for q, kv in _entries(part):
            parts = _flash_backward(
                *_batched(dout_MHD[q], query_MHD[q], key_SKD[kv], value_SKD[kv], out_MHD[q]),
                lse_HM[None, :, q],
                dropout_p=0.0,
                is_causal=part.causal,
                scale=scale,
            )
            for grad, rows, gradient in zip(grads, (q, kv, kv), parts, strict=True):
                grad[rows] = gradient[0].transpose(0, 1)
        return grads[0], grads[1], grads[2]


def _entries(part: Part) -> list[tuple[slice, slice]]:
    q_ends, kv_ends = (pairwise(accumulate(lens, initial=0)) for lens in (part.q_lens, part.kv_lens))
    return [(slice(*q), slice(*kv)) for q, kv in zip(q_ends, kv_ends, strict=True)]


def _batched(*tensors_LHD: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.transpose(0, 1)[None] for tensor in tensors_LHD]
