"""Attention of a step: each query to its own tokens and to the prompt that it shares, each prompt's keys read once.

The queries of all responses that share a segment are the rows of one product with its keys. The outputs over a
response's own tokens and over the segments of its prompt are merged by their log-sum-exp, which is exact, as in
flash decoding and Hydragen (arXiv 2402.05099). Nothing is gathered but queries and outputs.

Shapes: T queries of a step, R responses that decode (the first R queries), H heads, K key-value heads, G = H / K,
D head size; N slots of a shelf, L keys.
"""

from collections.abc import Sequence as Listing
from typing import Any, Final

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from inference_service.engine.kernels import Kernels, group_rows, length_bias
from inference_service.engine.parts import OwnPart, SharedPart, Span, StepParts

NAME: Final = "shared_prompt"


def step_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    parts: StepParts,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Stores the new keys and values and attends; called by every attention layer of the model.

    `query` is [1, H, T, D]; `key` and `value` are [1, K, T, D]. Returns [1, T, H, D]. Values may be of another size
    than keys, and the outputs are then; the store and the kernels have one size, so the shorter ones get zeros behind.
    """
    size = value.shape[-1]
    if size != key.shape[-1]:
        most = max(size, key.shape[-1])
        query, key, value = (F.pad(x, (0, most - x.shape[-1])) for x in (query, key, value))
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    query_THD, key_TKD, value_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    outputs = []
    if parts.num_responses:
        responses = slice(parts.num_responses)
        _store(parts.own, layer, key_TKD, value_TKD)
        outputs.append(_attend_responses(parts, layer, query_THD[responses], key.shape[1], scaling))
    for span in parts.spans:
        outputs.append(_attend_span(parts.kernels, span, layer, query, key, value, scaling))
    if parts.num_padding:
        outputs.append(query_THD.new_zeros(parts.num_padding, *query_THD.shape[1:]))
    output_THD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output_THD[..., :size].to(query.dtype).unsqueeze(0), None


def _store(own: Listing[OwnPart], layer: int, key_TKD: torch.Tensor, value_TKD: torch.Tensor) -> None:
    for part in own:
        for stored, new in ((part.shelf.keys, key_TKD), (part.shelf.values, value_TKD)):
            stored[layer][part.slots, :, part.positions] = new[part.queries].to(stored[layer].dtype)


def _attend_responses(
    parts: StepParts, layer: int, query_RHD: torch.Tensor, num_kv_heads: int, scaling: float
) -> torch.Tensor:
    num_responses, num_heads, head_dim = query_RHD.shape
    query_RKGD = query_RHD.reshape(num_responses, num_kv_heads, num_heads // num_kv_heads, head_dim)
    outputs, lses, merge = [], [], parts.kernels.merge
    for part in parts.own:
        keys, values = (
            x[layer][: part.shelf.num_in_use, :, : part.length] for x in (part.shelf.keys, part.shelf.values)
        )
        out_NKGD, lse_NKG = parts.kernels.attend(query_RKGD[part.query_of_slot], keys, values, part.bias, scaling)
        outputs.append(out_NKGD[part.slots])
        lses.append(lse_NKG[part.slots])
    out_RKGD, lse_RKG = (x[0] if len(x) == 1 else torch.cat(x) for x in (outputs, lses))
    for shared in parts.shared:
        out_MKGD, lse_MKG = _attend_shared(parts.kernels, shared, layer, query_RKGD, scaling)
        if len(shared.responses) == parts.num_responses:
            out_RKGD, lse_RKG = merge(out_RKGD, lse_RKG, out_MKGD, lse_MKG)
        else:
            some = shared.responses
            out_RKGD[some], lse_RKG[some] = merge(out_RKGD[some], lse_RKG[some], out_MKGD, lse_MKG)
    return out_RKGD.reshape(num_responses, num_heads, head_dim)


def _attend_shared(
    kernels: Kernels, part: SharedPart, layer: int, query_RKGD: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    num_kv_heads, per_kv, head_dim = query_RKGD.shape[1:]
    num_slots = part.slots.stop - part.slots.start
    keys, values = (x[layer][part.slots, :, : part.length] for x in (part.shelf.keys, part.shelf.values))
    # The heads of a response are next to each other, so that a bias of each response is one of each row.
    query_NKWGD = query_RKGD[part.queries].view(num_slots, part.width, num_kv_heads, per_kv, head_dim).transpose(1, 2)
    rows = query_NKWGD.reshape(num_slots, num_kv_heads, -1, head_dim)
    out, lse = kernels.attend(rows, keys, values, part.bias, scaling)
    out, lse = (x.unflatten(2, (part.width, per_kv)).transpose(1, 2).flatten(0, 1) for x in (out, lse))
    return out[part.places], lse[part.places]


def _attend_span(
    kernels: Kernels,
    span: Span,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """[queries, H, D]: causal among the new tokens, and all of what is before them."""
    shelf, slot = span.place.shelf, span.place.slot
    stop = span.start + span.queries.stop - span.queries.start
    for stored, new in ((shelf.keys, key), (shelf.values, value)):
        stored[layer][slot, :, span.start : stop] = new[0, :, span.queries]
    query_1HQD = query[:, :, span.queries].to(shelf.keys[layer].dtype)
    own_keys, own_values = (x[layer][slot : slot + 1] for x in (shelf.keys, shelf.values))
    out, lse = kernels.attend_from(query_1HQD, own_keys, own_values, span.start, scaling)
    for link in span.links:
        if not link.length:
            continue
        width = kernels.width(link.length)
        keys, values = (
            x[layer][link.place.slot : link.place.slot + 1, :, :width]
            for x in (link.place.shelf.keys, link.place.shelf.values)
        )
        bias = length_bias([link.length], width, query.device)
        other, other_lse = kernels.attend(group_rows(query_1HQD, keys), keys, values, bias, scaling)
        out, lse = kernels.merge(out, lse, other.reshape(out.shape), other_lse.reshape(lse.shape))
    return out[0].transpose(0, 1)


AttentionInterface.register(NAME, step_attention)
