"""Attention over sequences of any lengths is that of each query by itself, in float64."""

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_service.engine.ragged_attention import ragged_attention

SPANS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=5).filter(
    lambda spans: any(num_queries for num_queries, _ in spans)
)
"""(queries, keys before them) of each sequence; one without queries has no part in a step."""


class Cache:
    """Stands for transformers' paged cache: hands out the keys of all sequences, the new ones among them."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._all = keys, values

    def update(self, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self._all


def bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def attend(spans: list[tuple[int, int]], query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[1, T, H, D] of [1, H, T, D] queries."""
    num_queries = [q for q, _ in spans]
    output, _ = ragged_attention(
        SimpleNamespace(layer_idx=0),  # type: ignore[arg-type]
        query,
        keys,
        values,
        None,
        Cache(keys, values),  # type: ignore[arg-type]
        0.3,
        cu_seq_lens_q=bounds(num_queries),
        cu_seq_lens_k=bounds([q + before for q, before in spans]),
        max_length_q=max(num_queries),
    )
    return output


def expected(
    spans: list[tuple[int, int]], query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Query by query and head by head: softmax over the keys up to its own."""
    per_kv = query.shape[1] // keys.shape[1]
    output = torch.empty(1, query.shape[2], query.shape[1], query.shape[3], dtype=torch.float64)
    at = first_key = 0
    for num_queries, before in spans:
        for i in range(num_queries):
            seen = slice(first_key, first_key + before + i + 1)
            for head in range(query.shape[1]):
                scores = keys[0, head // per_kv, seen].double() @ query[0, head, at].double() * 0.3
                output[0, at, head] = scores.softmax(0) @ values[0, head // per_kv, seen].double()
            at += 1
        first_key += num_queries + before
    return output


@settings(max_examples=30, deadline=None)
@given(SPANS, st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32))
def test_each_query_attends_to_the_keys_of_its_own_sequence_up_to_itself(
    spans: list[tuple[int, int]], num_kv_heads: int, per_kv: int, seed: int
) -> None:
    # A sequence that has no part in the step has no keys in it either.
    spans = [(q, before if q else 0) for q, before in spans]
    generator = torch.Generator().manual_seed(seed)
    num_keys = sum(map(sum, spans))
    keys, values = torch.randn(2, 1, num_kv_heads, num_keys, 4, generator=generator)
    query = torch.randn(1, num_kv_heads * per_kv, sum(q for q, _ in spans), 4, generator=generator)
    torch.testing.assert_close(attend(spans, query, keys, values), expected(spans, query, keys, values).float())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 2**32))
def test_a_step_of_single_queries_gives_what_each_sequence_alone_gives(befores: list[int], seed: int) -> None:
    """Decoding is padded to the longest sequence; what stands behind a sequence's end must not reach it."""
    generator = torch.Generator().manual_seed(seed)
    num_keys = sum(befores) + len(befores)
    keys, values = torch.randn(2, 1, 2, num_keys, 4, generator=generator)
    query = torch.randn(1, 4, len(befores), 4, generator=generator)
    together = attend([(1, before) for before in befores], query, keys, values)
    first = 0
    for i, before in enumerate(befores):
        own = slice(first, first + before + 1)
        alone = attend([(1, before)], query[:, :, i : i + 1], keys[:, :, own], values[:, :, own])
        torch.testing.assert_close(together[:, i], alone[:, 0])
        first += before + 1
