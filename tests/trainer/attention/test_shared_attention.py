"""Shared-prompt attention on the CPU equals plain softmax attention of every sample computed unshared and alone.

Shape legend: T rows, H query heads, K key / value heads, D head dimension, L rows of one sample.
"""

import random
from collections.abc import Sequence

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.memory import allocated
from trainer.attention.segments import Segments
from trainer.attention.shared_attention import shared_prompt_attention
from trainer.devices import choose_device
from trainer.devices.attention_part import Part

CPU = torch.device("cpu")
LIMITS = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 8e-2}
"""Largest error allowed, relative to the largest value."""

Lengths = Sequence[tuple[int, Sequence[int]]]
"""(prompt rows, rows of each response) of each group; a group of which no response row is fed stands last."""


def ragged(rng: random.Random, num_groups: int, longest_prompt: int, longest_response: int) -> Lengths:
    def length(longest: int) -> int:
        return rng.randint(1, longest)

    return [(length(longest_prompt), [length(longest_response) for _ in range(length(9))]) for _ in range(num_groups)]


def make_lengths(name: str, rng: random.Random) -> Lengths:
    return {
        "ragged": lambda: ragged(rng, 3, 40, 30),
        "one response": lambda: [(rng.randint(1, 9), [rng.randint(1, 9)])],
        "one response of one row": lambda: [(1, [1])],
        "responses of one row": lambda: [(rng.randint(2, 9), [1] * rng.randint(2, 9)), (3, [1])],
        "prompts of one token": lambda: [(1, lens) for _, lens in ragged(rng, 4, 1, 12)],
        "no response row fed": lambda: [(rng.randint(1, 9), []), (rng.randint(1, 9), [])],
        "a group without fed rows": lambda: [*ragged(rng, 2, 9, 9), (rng.randint(1, 9), [])],
        "many tiny responses": lambda: [(9, [rng.randint(2, 11) for _ in range(8)]) for _ in range(40)],
        "tiny responses of ragged prompts": lambda: ragged(rng, 40, 12, 12),
        "long equal responses": lambda: [(150, [70] * 4), (150, [70] * 4)],
        "long and tiny": lambda: [(90, [80, 3, 100, 1, 7]), (5, [2, 130])],
    }[name]()


NAMES = (
    *("ragged", "one response", "one response of one row", "responses of one row", "prompts of one token"),
    *("no response row fed", "a group without fed rows", "many tiny responses", "tiny responses of ragged prompts"),
    *("long equal responses", "long and tiny"),
)


def make_segments(lengths: Lengths, padding: int = 0) -> Segments:
    """All prompts, then all responses, then padding rows that nothing else sees."""
    prompts, groups = [prompt for prompt, _ in lengths], [lens for _, lens in lengths]
    lens = (*prompts, *(n for group in groups for n in group), *((padding,) if padding else ()))
    attended = [(prompt, sum(group)) for prompt, group in lengths if group]
    cross = Part(tuple(n for _, n in attended), tuple(n for n, _ in attended), False, CPU) if attended else None
    return Segments(Part(lens, lens, True, CPU), cross, cross_q_start=sum(prompts))


def samples_of(lengths: Lengths, padding: int) -> list[tuple[list[int], int]]:
    """(rows of one sample, how many of its last ones are its own): every prompt, every response with its prompt."""
    samples, prompt_start, start = [], 0, sum(prompt for prompt, _ in lengths)
    for prompt, responses in lengths:
        prompt_rows = list(range(prompt_start, prompt_start + prompt))
        samples.append((prompt_rows, prompt))
        for length in responses:
            samples.append((prompt_rows + list(range(start, start + length)), length))
            start += length
        prompt_start += prompt
    return [*samples, (list(range(start, start + padding)), padding)] if padding else samples


def plain_attention(
    query_LHD: torch.Tensor,
    key_LKD: torch.Tensor,
    value_LKD: torch.Tensor,
    scale: float,
    window: int | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Causal attention of one sample, each row to the last `window` ones; a sink is one more score without a value."""
    per_key_head = query_LHD.shape[1] // key_LKD.shape[1]
    key_LHD, value_LHD = (x.repeat_interleave(per_key_head, 1) for x in (key_LKD, value_LKD))
    scores_HLL = torch.einsum("ihd,jhd->hij", query_LHD, key_LHD) * scale
    hidden_LL = torch.ones(scores_HLL.shape[1:], dtype=torch.bool).triu(1)
    if window is not None:
        hidden_LL |= torch.ones_like(hidden_LL).tril(-window)
    scores = scores_HLL.masked_fill(hidden_LL, -torch.inf)
    if sinks_H is not None:
        scores = torch.cat([scores, sinks_H[:, None, None].expand(-1, len(query_LHD), 1)], -1)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., : len(key_LKD)], value_LHD)


def unshared_attention(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    samples: Sequence[tuple[list[int], int]],
    scale: float,
    window: int | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    out_THD = torch.zeros_like(query_THD)
    for rows, num_own in samples:
        own_out = plain_attention(query_THD[rows], key_TKD[rows], value_TKD[rows], scale, window, sinks_H)[-num_own:]
        out_THD = out_THD.index_copy(0, torch.tensor(rows[-num_own:]), own_out)
    return out_THD


def largest_error(
    lengths: Lengths,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    padding: int = 0,
    window: int | None = None,
    *,
    has_sinks: bool = False,
) -> float:
    """Of output and gradients, relative to the largest value of each; the reference is in float64.

    Where the reference is 0, as queries' gradients are with a single key, relative to the inputs' size, which is 1.
    """
    segments = make_segments(lengths, padding)
    num_heads, num_kv_heads, head_dim = heads
    shapes = [(segments.num_rows, n, head_dim) for n in (num_heads, num_kv_heads, num_kv_heads, num_heads)]
    inputs = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
    scale = head_dim**-0.5
    inputs.insert(0, 2 * torch.randn(num_heads, dtype=torch.float64).to(dtype))

    sinks_H, *qkv, dout = (x.requires_grad_() for x in inputs)
    sinks = {"sinks_H": sinks_H} if has_sinks else {}
    out = shared_prompt_attention(*qkv, segments, scale, choose_device("cpu").ATTENTION, window=window, **sinks)
    actual = [out, *torch.autograd.grad(out, [*qkv, *sinks.values()], dout.detach())]

    sinks_H, *qkv, dout = (x.detach().double().requires_grad_() for x in inputs)
    sinks = {"sinks_H": sinks_H} if has_sinks else {}
    out = unshared_attention(*qkv, samples_of(lengths, padding), scale, window, sinks_H if has_sinks else None)
    expected = [out, *torch.autograd.grad(out, [*qkv, *sinks.values()], dout.detach())]
    assert all(x.dtype == dtype for x in actual)
    return max(
        float((a - e).detach().abs().max()) / (float(e.detach().abs().max()) or 1.0)
        for a, e in zip(actual, expected, strict=True)
    )


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", NAMES)
def test_equals_unshared_attention_of_every_sample(name: str, dtype: torch.dtype, rng: random.Random) -> None:
    lengths = make_lengths(name, rng)
    assert largest_error(lengths, dtype, rng.choice([(4, 4, 16), (4, 2, 32), (6, 1, 8)])) <= LIMITS[dtype], lengths


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", NAMES)
def test_a_window_equals_unshared_attention_of_every_sample(name: str, dtype: torch.dtype, rng: random.Random) -> None:
    lengths = make_lengths(name, rng)
    longest = make_segments(lengths).longest
    assert longest == max(prompt + max(responses, default=0) for prompt, responses in lengths)
    windows = {1, 2, rng.randint(1, longest), longest - 1, longest, longest + 1} - {0}
    for window in rng.sample(sorted(windows), min(3, len(windows))):
        error = largest_error(lengths, dtype, (4, 2, 16), rng.choice([0, 5]), window)
        assert error <= LIMITS[dtype], (window, lengths)


@pytest.mark.parametrize("window", [100, 300])
def test_a_window_of_many_blocks_equals_unshared_attention(window: int, rng: random.Random) -> None:
    lengths = [(rng.randint(600, 900), [rng.randint(1, 700) for _ in range(3)]), (5, [1, 600])]
    assert largest_error(lengths, torch.float64, (2, 1, 8), 0, window) <= LIMITS[torch.float64], lengths


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", NAMES)
def test_sinks_join_each_softmax_once(name: str, dtype: torch.dtype, rng: random.Random) -> None:
    """That of a response is over its prompt's keys and its own, in two parts, or in one with a window."""
    lengths = make_lengths(name, rng)
    for window in (None, rng.randint(1, 12)):
        error = largest_error(lengths, dtype, (4, 2, 16), rng.choice([0, 5]), window, has_sinks=True)
        assert error <= LIMITS[dtype], (window, lengths)


@pytest.mark.parametrize("padding", [1, 7, 80])
def test_padding_rows_change_nothing(padding: int, rng: random.Random) -> None:
    lengths = ragged(rng, 3, 30, 30)
    assert largest_error(lengths, torch.float64, (4, 2, 16), padding) <= LIMITS[torch.float64], lengths


def test_layout_mask_is_what_the_kernel_computes(rng: random.Random) -> None:
    segments = make_segments(ragged(rng, 4, 12, 12), padding=3)
    query, key, value = (torch.randn(segments.num_rows, n, 8, dtype=torch.float64) for n in (4, 2, 2))
    outs = [
        shared_prompt_attention(query, key, value, segments, 0.3, k) for k in (None, choose_device("cpu").ATTENTION)
    ]
    torch.testing.assert_close(*outs, rtol=1e-12, atol=1e-12)


def test_query_key_and_value_may_be_views_of_one_tensor(rng: random.Random) -> None:
    segments = make_segments(ragged(rng, 3, 20, 20))
    fused = torch.randn(segments.num_rows, 8, 16, dtype=torch.float64, requires_grad=True)
    results = []
    for parts in (fused.split([4, 2, 2], 1), [x.contiguous() for x in fused.split([4, 2, 2], 1)]):
        out = shared_prompt_attention(*parts, segments, 0.25, choose_device("cpu").ATTENTION)
        results.append((out, *torch.autograd.grad(out.square().sum(), fused)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_hundreds_of_tiny_responses_take_few_kernel_calls(rng: random.Random) -> None:
    lengths = [(9, [rng.randint(2, 11) for _ in range(8)]) for _ in range(64)]
    segments = make_segments(lengths)
    query, key, value = (torch.randn(segments.num_rows, n, 8) for n in (4, 2, 2))
    with profile(activities=[ProfilerActivity.CPU]) as run:
        shared_prompt_attention(query, key, value, segments, 0.3, choose_device("cpu").ATTENTION)
    kernel = "aten::_scaled_dot_product_flash_attention_for_cpu"
    num_calls = sum(event.count for event in run.key_averages() if event.key == kernel)
    assert 0 < num_calls <= 64 < len(segments.self_part.q_lens)


def memory_of(num_responses: int, rows: int, window: int | None) -> tuple[int, int, int]:
    """(peak bytes, bytes of the largest tensor, rows) of attention, forward and backward."""
    segments = make_segments([(64, [rows] * num_responses)])
    qkv = [torch.randn(segments.num_rows, n, 16, requires_grad=True) for n in (2, 1, 1)]
    dout = torch.randn(segments.num_rows, 2, 16)

    def run() -> None:
        out = shared_prompt_attention(*qkv, segments, 0.25, choose_device("cpu").ATTENTION, window=window)
        torch.autograd.grad(out, qkv, dout)

    run()
    used = allocated(run)
    return used.peak_bytes, used.largest_bytes, segments.num_rows


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("more", [(2, 1), (1, 2)])
def test_memory_is_linear_in_rows_and_has_no_square_tensor(more: tuple[int, int], window: int | None) -> None:
    num_responses, rows = 32, 48
    peak, largest, num_rows = memory_of(num_responses, rows, window)
    doubled, _, _ = memory_of(num_responses * more[0], rows * more[1], window)
    assert 0 < doubled <= 2 * peak
    # One byte per pair of rows is what the mask alone would take.
    assert largest < num_rows**2
