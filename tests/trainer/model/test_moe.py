"""Qwen3-MoE on Megatron equals transformers' own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from async_rl.method.types import Group
from trainer.trainer import MegatronTrainer

MakeTrainer = Callable[..., MegatronTrainer]


@pytest.mark.parametrize(
    ("options", "recompute"),
    [
        ({}, "none"),
        ({"norm_topk_prob": False, "seed": 1}, "selective"),
        ({"norm_topk_prob": False, "num_experts_per_tok": 1, "tied": True}, "none"),
        ({"num_experts": 8, "num_experts_per_tok": 3, "seed": 2}, "full"),
    ],
)
def test_log_probs_and_gradient_equal_transformers(
    options: dict[str, int],
    recompute: str,
    tiny_model: Callable[..., Path],
    make_trainer: MakeTrainer,
    ragged_groups: list[Group],
    grpo_in_transformers: Callable[..., object],
    tmp_path: Path,
) -> None:
    source = tiny_model("qwen3_moe", **options)
    trainer = make_trainer(source, recompute=recompute)
    trainer.save_hf(tmp_path / "saved")
    # Transformers loads what the trainer saved, so a mistake in the names would show here.
    expected = grpo_in_transformers(tmp_path / "saved", source, ragged_groups)
    largest = max(-min(row) for rows in expected.logprobs for row in rows)
    for group, rows in zip(ragged_groups, expected.logprobs, strict=True):
        responses = tuple(replace(r, logprobs=row) for r, row in zip(group.responses, rows, strict=True))
        (proof,) = trainer.accumulate([[replace(group, responses=responses)]])
        assert proof.all_gaps.largest <= 1e-5 * largest
    norm = torch.cat([g.flatten() for g in expected.gradients.values()]).norm()
    assert trainer.optimizer_step().grad_norm == pytest.approx(float(norm), rel=1e-5)


def test_training_moves_router_and_experts(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, ragged_groups: list[Group], tmp_path: Path
) -> None:
    source = tiny_model("qwen3_moe")
    trainer = make_trainer(source)
    trainer.accumulate([[group] for group in ragged_groups])
    trainer.optimizer_step()
    trainer.save_hf(tmp_path / "trained")
    before = AutoModelForCausalLM.from_pretrained(source).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "trained").state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in before)
