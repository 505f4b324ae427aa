"""Models with gated delta nets on Megatron equal transformers' own, over many chunks, in one stage and in two."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.method.types import Group
from async_rl.shared.delta_rule import CHUNK_ROWS
from tests.support.groups import random_group
from tests.support.tiny_model import make_tiny_model
from tests.trainer.test_forward_backward import Policy, hf_gradients_of, load
from trainer.batching.packing import pack
from trainer.forward_backward import make_passes
from trainer.parallel import Parallel
from trainer.trainer import MegatronTrainer

TOLERANCE = 1e-5
"""Of each gradient relative to its norm, with two layers. Four of them multiply roundings, and what all decays share is
a sum over all rows that nearly cancels, as that of an expert with few rows may: of ten seeds the worst were 4.4e-5 and
3.6e-5. The delta nets of transformers compute in float32, too."""

LONG = ((CHUNK_ROWS + 20, (3, 70, 130)), (2, (CHUNK_ROWS + 1, 1)), (131, (1, 20)), (1, (5, 65)))
"""(prompt tokens, response tokens of each response): shorter than the convolution, and longer than two chunks."""


def relative_errors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    assert set(found) == set(expected)
    return {
        name: float((gradient.double() - expected[name]).norm() / expected[name].norm().clamp(min=1e-30))
        for name, gradient in found.items()
    }


@pytest.mark.parametrize(
    ("family", "options", "recompute", "micro_batch_tokens", "groups"),
    [
        ("qwen3_next", {}, "none", 10_000, "long"),
        ("qwen3_next", {"num_hidden_layers": 4, "full_attention_interval": 4}, "full", 90, "long"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 3, "linear_num_value_heads": 6}, "selective", 90, "long"),
        ("qwen3_5_text", {"full_attention_interval": 1}, "none", 90, "long"),
        ("qwen3_5_text", {"full_attention_interval": 9}, "none", 20, "rollouts"),
        ("qwen3_next", {}, "none", 10_000, "rollouts"),
    ],
)
def test_log_probs_and_gradients_equal_transformers(
    family: str,
    options: dict[str, Any],
    recompute: str,
    micro_batch_tokens: int,
    groups: str,
    make_trainer: Callable[..., MegatronTrainer],
    rollout_groups: list[Group],
    grpo_in_transformers: Callable[..., Any],
    hf_gradients: Callable[[MegatronTrainer], dict[str, torch.Tensor]],
    rng: random.Random,
    tmp_path: Path,
) -> None:
    source = make_tiny_model(tmp_path / "source", family, seed=rng.randrange(2**31), **options)
    trainer = make_trainer(source, recompute=recompute, micro_batch_tokens=micro_batch_tokens)
    trainer.save_hf(tmp_path / "saved")
    some = rollout_groups
    if groups == "long":
        some = [random_group(i, prompt, lens, rng, rewards=range(len(lens))) for i, (prompt, lens) in enumerate(LONG)]
    # Transformers loads what the trainer saved, so a mistake in the names would show here.
    expected = grpo_in_transformers(tmp_path / "saved", source, some)
    largest = max(-min(row) for rows in expected.logprobs for row in rows)
    sampled = [
        replace(g, responses=tuple(replace(r, logprobs=row) for r, row in zip(g.responses, rows, strict=True)))
        for g, rows in zip(some, expected.logprobs, strict=True)
    ]
    for proof in trainer.accumulate(pack(sampled, micro_batch_tokens)):
        assert proof.all_gaps.largest <= TOLERANCE * largest
    num_labels = sum(group.num_response_tokens for group in some)
    gradients = {name: gradient / num_labels for name, gradient in hf_gradients(trainer).items()}
    errors = relative_errors(gradients, expected.gradients)
    for name, error in errors.items():
        is_rounded = options.get("num_hidden_layers", 2) > 2 or name.endswith(("A_log", "dt_bias"))
        assert error <= (10 * TOLERANCE if is_rounded else TOLERANCE), f"{name}: {error:.1e}"


def test_two_stages_and_recomputation_change_nothing_in_float64(
    tiny_model: Callable[..., Path], parallel: Parallel, rng: random.Random
) -> None:
    path = tiny_model("qwen3_next", num_hidden_layers=3)
    groups = [random_group(i, prompt, lens, rng) for i, (prompt, lens) in enumerate(LONG)]
    results = []
    for recompute, max_tokens in (("none", 10_000), ("none", 90), ("full", 90)):
        model = load(path, torch.float64, recompute, parallel)
        for a_pass in make_passes(pack(groups, max_tokens), parallel, 1.0, max_tokens):
            a_pass.train(Policy(model), lambda number, logprobs_N, *_: logprobs_N.square().sum())
        results.append(hf_gradients_of(model))
    for staged in results[1:]:
        assert max(relative_errors(staged, results[0]).values()) <= 1e-11
