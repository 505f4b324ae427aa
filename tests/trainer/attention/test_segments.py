"""Who attends to whom, pair by pair."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.attention.segments import Segments
from trainer.devices.attention_part import Part

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def segments(draw: st.DrawFn) -> Segments:
    """Segments of their own, some of them behind the rows of a cache, and a cross part within both."""
    q_lens = draw(LENGTHS)
    self_kv_start = draw(st.integers(0, 4))
    num_rows, num_kv = sum(q_lens), self_kv_start + sum(q_lens)
    cross_q, cross_kv = [], []
    rows_left, keys_left = num_rows, num_kv
    for q, kv in draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=3)):
        if q <= rows_left and kv <= keys_left:
            cross_q.append(q)
            cross_kv.append(kv)
            rows_left, keys_left = rows_left - q, keys_left - kv
    cross = Part(tuple(cross_q), tuple(cross_kv), False, CPU) if cross_q else None
    return Segments(Part(q_lens, q_lens, True, CPU), cross, self_kv_start, draw(st.integers(0, rows_left)))


def attends(some: Segments, row: int, column: int) -> bool:
    """Told from the lengths, one pair at a time."""
    begin = 0
    for length in some.self_part.q_lens:
        if begin <= row < begin + length and some.self_kv_start + begin <= column <= some.self_kv_start + row:
            return True
        begin += length
    if some.cross_part is None:
        return False
    first_row, first_key = some.cross_q_start, 0
    for num_rows, num_keys in zip(some.cross_part.q_lens, some.cross_part.kv_lens, strict=True):
        if 0 <= row - first_row < num_rows and 0 <= column - first_key < num_keys:
            return True
        first_row, first_key = first_row + num_rows, first_key + num_keys
    return False


@settings(max_examples=100)
@given(segments())
def test_the_mask_is_that_of_every_pair(some: Segments) -> None:
    num_kv = some.self_kv_start + some.num_rows
    assert some.dense_mask_TS.tolist() == [[attends(some, r, c) for c in range(num_kv)] for r in range(some.num_rows)]
