"""Models with experts on Megatron equal transformers' own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from async_rl.method.types import Group
from tests.support.tiers import at_night
from tests.support.tiny_model import make_tiny_model
from trainer.trainer import MegatronTrainer

MakeTrainer = Callable[..., MegatronTrainer]


MOONLIGHT = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": {"rope_type": "default"}}
NO_DENSE = {"first_k_dense_replace": 0, "n_group": 2, "topk_group": 1, "v_head_dim": 24, "rope_interleave": False}


@pytest.mark.parametrize(
    ("family", "options", "recompute"),
    [
        at_night("qwen3_moe", {}, "none"),
        ("qwen3_moe", {"norm_topk_prob": False, "seed": 1}, "selective"),
        at_night("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 1, "tied": True}, "none"),
        at_night("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 3, "seed": 2}, "full"),
        ("deepseek_v3", {"num_hidden_layers": 3, "n_group": 2, "topk_group": 1}, "full"),
        at_night("deepseek_v3", MOONLIGHT, "selective"),
        ("deepseek_v3", NO_DENSE | {"norm_topk_prob": False}, "none"),
        at_night("glm4_moe", {"use_qk_norm": False, "attention_bias": False, "first_k_dense_replace": 2}, "full"),
        at_night("glm4_moe", {"first_k_dense_replace": 0, "n_shared_experts": 1, "partial_rotary_factor": 1.0}, "none"),
        ("minimax_m2", {"num_experts_per_tok": 2, "num_key_value_heads": 1}, "selective"),
        at_night("gpt_oss", {"num_local_experts": 8, "num_experts_per_tok": 3, "num_key_value_heads": 1}, "selective"),
        ("gpt_oss", {"attention_bias": False, "swiglu_alpha": 0.7, "swiglu_limit": 0.1, "tied": True}, "full"),
    ],
)
def test_log_probs_and_gradient_equal_transformers(
    family: str,
    options: dict[str, Any],
    recompute: str,
    make_trainer: MakeTrainer,
    ragged_groups: list[Group],
    grpo_in_transformers: Callable[..., object],
    tmp_path: Path,
) -> None:
    source = make_tiny_model(tmp_path / "source", family, **options)
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
