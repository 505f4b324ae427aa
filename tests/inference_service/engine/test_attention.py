"""Attention to two sets of keys, merged, is attention to both, in float64; bands leave nobody out."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_service.engine.kernels import attend, attend_causally, length_bias, merge
from inference_service.engine.parts import CALL_ROWS, bands


def expected(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    scores = (query.double() @ keys.double().transpose(-1, -2) * 0.3).masked_fill(~seen, -math.inf)
    return scores.softmax(-1) @ values.double()


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.lists(st.integers(1, 70), min_size=1, max_size=5), st.integers(1, 40))
def test_merged_parts_are_attention_to_all_keys(seed: int, lengths: list[int], num_other: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch, heads, queries, dim, longest = len(lengths), 2, 3, 8, max(lengths)
    query = torch.randn(batch, heads, queries, dim, generator=generator)
    keys, values = torch.randn(2, batch, heads, longest + num_other, dim, generator=generator)
    bias = length_bias(lengths, longest, torch.device("cpu"))
    own = attend(query, keys[:, :, :longest], values[:, :, :longest], bias, 0.3)
    other = attend(query, keys[:, :, longest:], values[:, :, longest:], None, 0.3)
    out, _ = merge(*own, *other)
    place = torch.arange(longest + num_other)
    seen = (place < torch.tensor(lengths)[:, None]) | (place >= longest)
    torch.testing.assert_close(out, expected(query, keys, values, seen[:, None, None]).float())


def test_parts_in_bfloat16_with_sums_in_float32_merge() -> None:
    # As on a device: on a CPU keys and values are kept in float32.
    out, other = torch.randn(2, 2, 3, 4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    lse, other_lse = torch.randn(2, 2, 3, 4, generator=torch.Generator().manual_seed(1))
    merged, _ = merge(out, lse, other, other_lse)
    wanted, _ = merge(out.double(), lse.double(), other.double(), other_lse.double())
    assert merged.dtype == torch.bfloat16
    torch.testing.assert_close(merged, wanted.bfloat16(), rtol=2**-8, atol=0)


def test_causal_attention_sees_no_later_key() -> None:
    query, keys, values = torch.randn(3, 1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    out, lse = attend_causally(query, keys, values, 0.3)
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    torch.testing.assert_close(out, expected(query, keys, values, seen).float())
    assert lse.shape == (1, 2, 9)


@settings(max_examples=200)
@given(st.dictionaries(st.integers(0, 60), st.integers(1, 200), max_size=20))
def test_bands_contain_every_slot_once_and_are_never_dearer_than_one_by_one(widths: dict[int, int]) -> None:
    found = bands(widths)
    covered = [slot for band in found for slot in range(band.start, band.stop)]
    assert len(covered) == len(set(covered)) and set(widths) <= set(covered)
    cost = sum(
        (band.stop - band.start) * max(widths.get(slot, 0) for slot in range(band.start, band.stop)) + CALL_ROWS
        for band in found
    )
    assert cost <= sum(width + CALL_ROWS for width in widths.values())
