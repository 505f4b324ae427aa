"""The benchmark's three ways compute the same, its memory is linear, and it runs on a small case."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from benchmarks.common.memory import Allocated, allocated
from benchmarks.shared_prompt import SHAPE, Case, make_group, make_model, measure, packed, padded, run, shared
from trainer.model.gpt import SharedPromptGPT
from trainer.parallel import Parallel

SMALL = replace(SHAPE, hidden_size=32, ffn_size=48, num_heads=4, head_dim=8, vocab_size=64)


@pytest.fixture(scope="module")
def model(parallel: Parallel) -> SharedPromptGPT:
    return make_model(SMALL, parallel)


def gradients(model: SharedPromptGPT, way: Callable[[], None]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    way()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_shared_packed_and_padded_have_the_same_gradients(model: SharedPromptGPT, chunk: int) -> None:
    group, weights_GR = make_group(Case(9, 6, 5), SMALL.vocab_size), torch.randn(5, 6)
    expected = gradients(model, lambda: shared(model, group, weights_GR, 100))
    assert all(grad.any() for grad in expected.values())
    ways = [
        lambda: shared(model, group, weights_GR, 9 + 5 * chunk),
        lambda: run(model, packed(group, chunk), weights_GR),
        lambda: run(model, padded(group, chunk), weights_GR),
    ]
    for way in ways:
        torch.testing.assert_close(gradients(model, way), expected, rtol=1e-4, atol=1e-4)


def test_small_case_reports_speed_and_memory(model: SharedPromptGPT) -> None:
    lines: list[str] = []
    result = measure(model, Case(40, 8, 4), 1, lines.append)
    assert (result["prompt"], result["response"], result["group"]) == (40, 8, 4)
    assert result["token_ratio"] == pytest.approx(4 * 48 / 72, abs=1e-3)
    assert result["speedup"] == pytest.approx(
        min(result["packed_s"], result["padded_s"]) / result["shared_s"], rel=0.05
    )
    assert result["peak_bytes_shared"] > 0 and result["peak_bytes_unshared"] > 0
    assert len(lines) == 1


def memory_of(model: SharedPromptGPT, case: Case) -> Allocated:
    group, weights_GR = make_group(case, SMALL.vocab_size), torch.randn(case.group, case.response)

    def once() -> None:
        shared(model, group, weights_GR, 10**6)

    once()
    return allocated(once)


def test_memory_of_a_model_is_linear_in_rows_and_has_no_square_tensor(model: SharedPromptGPT) -> None:
    case = Case(64, 48, 32)
    once = memory_of(model, case)
    for doubled in (replace(case, group=64), replace(case, response=96)):
        assert memory_of(model, doubled).peak_bytes <= 2 * once.peak_bytes
    num_rows = case.prompt + case.group * (case.response - 1)
    # One byte per pair of rows is what the mask alone would take.
    assert once.largest_bytes < num_rows**2


def test_allocated_counts_what_is_alive_at_once() -> None:
    def function() -> None:
        first = torch.zeros(1000)
        del first
        second, third = torch.zeros(500), torch.zeros(600)
        assert len(second) < len(third)

    assert allocated(function) == Allocated(peak_bytes=4400, largest_bytes=4000)
