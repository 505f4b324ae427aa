"""Qwen3-MoE on Megatron equals transformers' own, and unsupported forms of it are refused by name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from async_rl.errors import ConfigError
from async_rl.types import Group
from trainer.hf_config import read_model_shape, require_layout
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
        assert proof.max_logprob_gap <= 1e-5 * largest
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


def test_layouts_that_cannot_divide_the_experts_are_refused(tiny_model: Callable[..., Path]) -> None:
    moe = read_model_shape(tiny_model("qwen3_moe"))
    require_layout(moe, tensor=2, pipeline=2, expert=4, sequence_parallel=True)
    with pytest.raises(ConfigError, match=r"expert_parallel = 3 does not divide the model's 4 experts"):
        require_layout(moe, 1, 1, 3, False)
    with pytest.raises(ConfigError, match=r"tensor_parallel = 2 with a model of experts needs trainer\.sequence_par"):
        require_layout(moe, 2, 1, 2, False)
    with pytest.raises(ConfigError, match=r"expert_parallel is 2, but the model has no experts"):
        require_layout(read_model_shape(tiny_model("qwen3")), 1, 1, 2, False)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "message"),
    [
        (8, 1, "tensor_parallel = 8 does not divide the model's 4 attention heads"),
        (4, 1, "tensor_parallel = 4 does not divide the model's 2 key / value heads"),
        (1, 3, "pipeline_parallel = 3 does not divide the model's 2 layers"),
    ],
)
def test_layouts_that_cannot_divide_a_model_are_refused(
    tensor: int, pipeline: int, message: str, tiny_model: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match=message):
        require_layout(read_model_shape(tiny_model("qwen3")), tensor, pipeline, 1, False)
