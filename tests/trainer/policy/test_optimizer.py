"""Megatron's Adam, clipping and the learning-rate schedule against torch's AdamW."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from async_rl.config.train_section import OptimizerSection
from async_rl.method.types import Group
from trainer.policy.optimizer import LearningRate
from trainer.trainer import MegatronTrainer


def test_steps_equal_torch_adamw(
    tiny_model: Callable[..., Path],
    make_trainer: Callable[..., MegatronTrainer],
    ragged_groups: list[Group],
    hf_gradients: Callable[[MegatronTrainer], dict[str, torch.Tensor]],
) -> None:
    trainer = make_trainer(
        tiny_model("qwen2"), learning_rate=1e-2, warmup_iterations=2, weight_decay=0.1, clip_grad_norm=0.05
    )
    weights = {spec.name: tensor.clone().requires_grad_() for spec, tensor in trainer.export.stream()}
    decayed = [w for w in weights.values() if w.dim() > 1]
    spared = [w for w in weights.values() if w.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    for learning_rate in (0.5e-2, 1e-2, 1e-2):
        for group in ragged_groups:
            trainer.accumulate([[group]])
        num_tokens = sum(group.num_response_tokens for group in ragged_groups)
        for name, gradient in hf_gradients(trainer).items():
            weights[name].grad = gradient / num_tokens
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), 0.05)
        for param_group in adam.param_groups:
            param_group["lr"] = learning_rate
        adam.step()
        stats = trainer.optimizer_step()
        assert stats.learning_rate == learning_rate
        assert stats.grad_norm == pytest.approx(float(norm), rel=1e-6)
        assert stats.grad_norm > 0.05  # clipping was at work
        for spec, tensor in trainer.export.stream():
            torch.testing.assert_close(tensor, weights[spec.name].detach(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("schedule", "ratio", "rates"),
    [
        (
            "cosine",
            0.2,
            [0.5, 1.0, 1.0, 0.8, 0.4, 0.2, 0.2],
        ),
        ("constant", 1.0, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", 0.1, [0.5, 1.0, 1.0, 0.7, 0.4, 0.1, 0.1]),
    ],
)
def test_each_schedule_ends_where_it_is_to_end(schedule: str, ratio: float, rates: list[float]) -> None:
    settings = {"schedule": schedule, "min_learning_rate_ratio": ratio, "warmup_iterations": 2}
    section = OptimizerSection.model_validate({"learning_rate": 1.0, **settings})
    assert [LearningRate(section, num_iterations=6).at_iteration(i) for i in range(7)] == pytest.approx(rates)


@pytest.mark.parametrize(("schedule", "ratio"), [("cosine", 1.0), ("constant", 0.5)])
def test_a_schedule_that_contradicts_its_end_is_refused(schedule: str, ratio: float) -> None:
    with pytest.raises(ValidationError, match=f"schedule is {schedule}, but min_learning_rate_ratio is {ratio:g}"):
        OptimizerSection.model_validate({"schedule": schedule, "min_learning_rate_ratio": ratio})


def test_the_schedule_begins_after_the_iterations_that_are_held() -> None:
    section = OptimizerSection(learning_rate=1.0, min_learning_rate_ratio=0.1, warmup_iterations=2)
    rates = [LearningRate(section, num_iterations=9, num_held=3).at_iteration(i) for i in range(10)]
    assert rates == pytest.approx([0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 0.7, 0.4, 0.1, 0.1])


def test_single_iteration_runs_at_the_peak() -> None:
    section = OptimizerSection(learning_rate=1.0, min_learning_rate_ratio=0.0)
    assert LearningRate(section, num_iterations=1).at_iteration(0) == 1.0
