"""Attention of a step: each query to its own tokens and to the prompt that it shares, each prompt's keys read once.

The queries of all responses that share a segment are the rows of one product with its keys. The outputs over a
response's own tokens and over the segments of its prompt are merged by their log-sum-exp, which is exact, as in
flash decoding and Hydragen (arXiv 2402.05099). Nothing is gathered but queries and outputs.

Layers that attend to the last W tokens only do the same, with what is further away excluded by its position; where all
of a part is, its log-sum-exp is so low that merging leaves it out.

Attention sinks, a logit s of each head that has no value, join after all parts: from output o and log-sum-exp l,
o sigmoid(l - s).

Shapes: T queries of a step, R responses that decode (the first R queries), H heads, K key-value heads, G = H / K,
D head size; N slots of a shelf, L keys.
"""

from collections.abc import Sequence as Listing
from typing import Any, Final

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from inference_service.engine.kernels import MASKED, Attended, Kernels, group_rows, length_bias
from inference_service.engine.parts import OwnPart, SharedPart, Span, StepParts
from inference_service.engine.segments import Link

NAME: Final = "shared_prompt"


def step_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    parts: StepParts,
    scaling: float,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Stores the new keys and values and attends; called by every attention layer of the model.

    `query` is [1, H, T, D]; `key` and `value` are [1, K, T, D]. Returns [1, T, H, D]. Values may be of another size
    than keys, and the outputs are then; the store and the kernels have one size, so the shorter ones get zeros behind.
    With `sliding_window` a token attends to that many of the last ones only, itself included. `s_aux` are sinks, [H].
    """
    window = None if sliding_window is None or sliding_window >= parts.longest else sliding_window
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
        attended = _attend_responses(parts, layer, query_THD[responses], key.shape[1], scaling, window)
        outputs.append(_with_sinks(*attended, s_aux))
    for span in parts.spans:
        attended = _attend_span(parts.kernels, span, layer, query, key, value, scaling, window)
        outputs.append(_with_sinks(*attended, s_aux))
    if parts.num_padding:
        outputs.append(query_THD.new_zeros(parts.num_padding, *query_THD.shape[1:]))
    output_THD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output_THD[..., :size].to(query.dtype).unsqueeze(0), None


def _with_sinks(out_THD: torch.Tensor, lse_TH: torch.Tensor, sinks_H: torch.Tensor | None) -> torch.Tensor:
    if sinks_H is None:
        return out_THD
    return (out_THD * torch.sigmoid(lse_TH - sinks_H)[..., None]).to(out_THD.dtype)


def _store(own: Listing[OwnPart], layer: int, key_TKD: torch.Tensor, value_TKD: torch.Tensor) -> None:
    for part in own:
        for stored, new in ((part.shelf.keys, key_TKD), (part.shelf.values, value_TKD)):
            stored[layer][part.slots, :, part.positions] = new[part.queries].to(stored[layer].dtype)


def _attend_responses(
    parts: StepParts, layer: int, query_RHD: torch.Tensor, num_kv_heads: int, scaling: float, window: int | None
) -> Attended:
    """[R, H, D], and log-sum-exps [R, H]."""
    num_responses, num_heads, head_dim = query_RHD.shape
    query_RKGD = query_RHD.reshape(num_responses, num_kv_heads, num_heads // num_kv_heads, head_dim)
    outputs, lses, merge = [], [], parts.kernels.merge
    for part in parts.own:
        keys, values = (
            x[layer][: part.shelf.num_in_use, :, : part.length] for x in (part.shelf.keys, part.shelf.values)
        )
        bias = part.bias
        if window is not None:
            places_L = torch.arange(part.length, device=query_RHD.device)
            bias = _excluding(bias, (places_L < part.lengths[:, None] - window)[:, None, None])
        out_NKGD, lse_NKG = parts.kernels.attend(query_RKGD[part.query_of_slot], keys, values, bias, scaling)
        outputs.append(out_NKGD[part.slots])
        lses.append(lse_NKG[part.slots])
    out_RKGD, lse_RKG = (x[0] if len(x) == 1 else torch.cat(x) for x in (outputs, lses))
    for shared in parts.shared:
        last = None if window is None else parts.positions[shared.queries] - window - shared.starts
        out_MKGD, lse_MKG = _attend_shared(parts.kernels, shared, layer, query_RKGD, scaling, last)
        if len(shared.responses) == parts.num_responses:
            out_RKGD, lse_RKG = merge(out_RKGD, lse_RKG, out_MKGD, lse_MKG)
        else:
            some = shared.responses
            out_RKGD[some], lse_RKG[some] = merge(out_RKGD[some], lse_RKG[some], out_MKGD, lse_MKG)
    return out_RKGD.reshape(num_responses, num_heads, head_dim), lse_RKG.reshape(num_responses, num_heads)


def _excluding(bias: torch.Tensor | None, is_outside: torch.Tensor) -> torch.Tensor:
    """The bias, where there is one, with more keys excluded: [N, 1, rows, L]."""
    start = torch.zeros(is_outside.shape, device=is_outside.device) if bias is None else bias
    return start.masked_fill(is_outside, MASKED)


def _attend_shared(
    kernels: Kernels,
    part: SharedPart,
    layer: int,
    query_RKGD: torch.Tensor,
    scaling: float,
    last_outside: torch.Tensor | None,
) -> Attended:
    """`last_outside`, [N * width]: the last key of the segment that is too far away for a query, if any is."""
    num_kv_heads, per_kv, head_dim = query_RKGD.shape[1:]
    num_slots = part.slots.stop - part.slots.start
    keys, values = (x[layer][part.slots, :, : part.length] for x in (part.shelf.keys, part.shelf.values))
    # The heads of a response are next to each other, so that a bias of each response is one of each row.
    query_NKWGD = query_RKGD[part.queries].view(num_slots, part.width, num_kv_heads, per_kv, head_dim).transpose(1, 2)
    rows = query_NKWGD.reshape(num_slots, num_kv_heads, -1, head_dim)
    bias = part.bias
    if last_outside is not None:
        places_L = torch.arange(part.length, device=rows.device)
        bias = _excluding(bias, (places_L <= last_outside[:, None]).view(num_slots, 1, part.width, part.length))
    out, lse = kernels.attend(rows, keys, values, bias, scaling)
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
    window: int | None,
) -> Attended:
    """[queries, H, D], and log-sum-exps [queries, H]: causal among the new tokens, and all of what is before them."""
    shelf, slot = span.place.shelf, span.place.slot
    stop = span.start + span.queries.stop - span.queries.start
    for stored, new in ((shelf.keys, key), (shelf.values, value)):
        stored[layer][slot, :, span.start : stop] = new[0, :, span.queries]
    query_1HQD = query[:, :, span.queries].to(shelf.keys[layer].dtype)
    own_keys, own_values = (x[layer][slot : slot + 1] for x in (shelf.keys, shelf.values))
    if window is not None:
        return _attend_span_within(kernels, span, layer, query_1HQD, scaling, window)
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
    return out[0].transpose(0, 1), lse[0].T


def _attend_span_within(
    kernels: Kernels, span: Span, layer: int, query_1HQD: torch.Tensor, scaling: float, window: int
) -> Attended:
    """As `_attend_span`, of keys that are stored, and within the window of each query."""
    first = span.base + span.start
    num_queries, num_heads = query_1HQD.shape[2], query_1HQD.shape[1]
    positions_Q = torch.arange(first, first + num_queries, device=query_1HQD.device)[:, None]
    merged: Attended | None = None
    own = Link(span.place, span.start + num_queries)
    starts = [span.base - sum(link.length for link in span.links[: i + 1]) for i in range(len(span.links))]
    for link, start in zip((own, *span.links), (span.base, *starts), strict=True):
        begin = max(0, first - window + 1 - start)
        if begin >= link.length:
            continue
        keys, values = (
            x[layer][link.place.slot : link.place.slot + 1, :, begin : link.length]
            for x in (link.place.shelf.keys, link.place.shelf.values)
        )
        places_L = torch.arange(start + begin, start + link.length, device=query_1HQD.device)
        bias = _excluding(None, (places_L > positions_Q) | (places_L <= positions_Q - window))[None, None]
        bias = bias.repeat(1, 1, num_heads // keys.shape[1], 1)
        out, lse = kernels.attend(group_rows(query_1HQD, keys), keys, values, bias, scaling)
        attended = out.reshape(query_1HQD.shape), lse.reshape(query_1HQD.shape[:3])
        merged = attended if merged is None else kernels.merge(*merged, *attended)
    assert merged is not None, "a token attends to itself"
    return merged[0][0].transpose(0, 1), merged[1][0].T


AttentionInterface.register(NAME, step_attention)
