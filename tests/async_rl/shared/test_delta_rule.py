"""The gated delta rule by chunks is the one row by row, forward and backward, whatever chunks, lengths and states are.

Shape legend: L rows of a sequence, H key heads, R value heads of each, K and V dimensions of a key and a value head, B
sequences, N chunks, C rows of each.
"""

import random
from collections.abc import Sequence

import pytest
import torch

from async_rl.shared.delta_rule import CHUNK_ROWS, Chunks, causal_convolution, gated_delta_rule, rows_of_chunk

H, R, K, V = 2, 3, 5, 4


class Rows:
    """Random inputs of some sequences of these lengths, with gradients, and what each begins with."""

    def __init__(self, lens: Sequence[int], rng: random.Random, dtype: torch.dtype, *, repeats: bool = False) -> None:
        num_rows = sum(lens)

        def random_tensor(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=torch.float64)

        mixed = random_tensor(num_rows, H, 2 * K + R * V)
        decays = -random_tensor(num_rows, H, R).abs() * rng.choice((1e-3, 0.1, 3.0))
        if repeats:
            # One key again and again, written over almost whole: powers of the chunk's matrix would overflow.
            mixed[:, :, K : 2 * K] = mixed[:1, :, K : 2 * K]
            decays *= 1e-3
        rates = random_tensor(num_rows, H, R).sigmoid() if not repeats else 1 - 1e-3 * torch.rand(num_rows, H, R)
        self.lens = lens
        self.inputs = [
            each.to(dtype).requires_grad_() for each in (mixed, rates, decays, random_tensor(len(lens), H, R, K, V))
        ]

    def take_gradients(self) -> list[torch.Tensor]:
        taken = [each.grad.double() for each in self.inputs]
        for each in self.inputs:
            each.grad = None
        return taken


def row_by_row(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Equation 10 of the paper, in float64: outputs [L, H, R, V] of all sequences in a row, final states."""
    mixed, rates, decays, states = (each.double() for each in rows.inputs)
    query, key, values = mixed.split([K, K, R * V], -1)
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    values = values.unflatten(-1, (R, V))
    outs, finals, t = [], [], 0
    for length, state in zip(rows.lens, states, strict=True):
        for _ in range(length):
            decayed = decays[t].exp()[..., None, None] * state
            error = values[t] - torch.einsum("hk,hrkv->hrv", key[t], decayed)
            state = decayed + torch.einsum("hr,hk,hrv->hrkv", rates[t], key[t], error)
            outs.append(torch.einsum("hk,hrkv->hrv", query[t], state) / K**0.5)
            t += 1
        finals.append(state)
    return torch.stack(outs), torch.stack(finals)


def by_chunks(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    chunk_rows = rows_of_chunk(max(rows.lens))
    chunks = Chunks.of(rows.lens, chunk_rows)
    places = torch.tensor([place for own in chunks.places for place in own])
    order = torch.tensor(chunks.order)
    *own, states = rows.inputs
    laid = [
        each.new_zeros(chunks.num_places, *each.shape[1:]).index_copy(0, places, each).unflatten(0, (-1, chunk_rows))
        for each in own
    ]
    out, finals = gated_delta_rule(*laid, states[order], chunks.counts, K)
    return out.flatten(0, 1)[places], finals[order.argsort()]


def test_chunks_equal_rows_one_by_one(rng: random.Random) -> None:
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
        for lens in ([1], [64], [65, 2, 64], [rng.randint(1, 200) for _ in range(4)], [3, 1, 8]):
            rows = Rows(lens, rng, dtype)
            compare(rows, tolerance)


@pytest.mark.parametrize("length", [64, 150])
def test_a_key_that_repeats_in_every_row_loses_no_digits(length: int, rng: random.Random) -> None:
    compare(Rows([length], rng, torch.float32, repeats=True), 1e-4)


def compare(rows: Rows, tolerance: float) -> None:
    """Differences relative to the norm."""
    results = []
    weights = [torch.randn(sum(rows.lens), H, R, V), torch.randn(len(rows.lens), H, R, K, V)]
    for computed in (row_by_row(rows), by_chunks(rows)):
        sum((each * weight.to(each.dtype)).sum() for each, weight in zip(computed, weights, strict=True)).backward()
        results.append([*(each.detach().double() for each in computed), *rows.take_gradients()])
    for expected, actual in zip(*results, strict=True):
        assert float((actual - expected).norm()) <= tolerance * float(expected.norm()), rows.lens


@pytest.mark.parametrize("width", [1, 3, 4])
def test_the_convolution_is_that_of_torch(width: int) -> None:
    rows, taps = torch.randn(20, 6), torch.randn(width, 6)
    last = torch.arange(width - 1, 20)
    expected = torch.conv1d(rows.T[None], taps.T[:, None], groups=6)[0].T
    torch.testing.assert_close(causal_convolution(rows, taps, last), torch.nn.functional.silu(expected))


def test_chunks_have_a_row_for_a_single_token_and_no_more_than_their_most() -> None:
    assert [rows_of_chunk(n) for n in (1, 2, 3, CHUNK_ROWS - 1, CHUNK_ROWS, CHUNK_ROWS + 1)] == [
        1,
        2,
        4,
        CHUNK_ROWS,
        CHUNK_ROWS,
        CHUNK_ROWS,
    ]
