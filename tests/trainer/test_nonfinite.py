"""A gradient that is not finite: no step, everything else as it was, and an end after too many of them in a row."""

import logging
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from async_rl.errors import NonFiniteGradient
from async_rl.method.types import Group
from tests.support.trainer.checkpoint_worker import Run
from trainer.checkpoint.files import read_manifest
from trainer.parallel import Parallel
from trainer.policy.optimizer import MAX_SKIPS_IN_A_ROW, StepCounts
from trainer.trainer import MegatronTrainer

MakeTrainer = Callable[..., MegatronTrainer]


def state_of(trainer: MegatronTrainer) -> list[torch.Tensor]:
    """Weights, master weights and moments, and the old policy's weights."""
    states = [x for s in trainer.optimizer.parameter_states() for x in (s.parameter, s.master, *s.moments.values())]
    if trainer.models.old is not None:
        with trainer.models.old.resident() as old:
            states += old.parameters()
    return [tensor.detach().clone() for tensor in states]


def equal(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def accumulate(trainer: MegatronTrainer, groups: list[Group], poison: float | None = None) -> None:
    for group in groups:
        trainer.accumulate([[group]])
    if poison is not None:
        parameters = list(trainer.models.policy.parameters())
        parameters[len(parameters) // 2].main_grad.view(-1)[1] = poison


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("poison", [float("inf"), float("nan"), 1e30])
def test_no_step_is_taken_and_training_goes_on_as_if_the_batch_had_not_been(
    poison: float,
    dtype: str,
    tiny_model: Callable[..., Path],
    make_trainer: MakeTrainer,
    ragged_groups: list[Group],
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = {"dtype": dtype, "old_policy": "lagged"}
    trainer, undisturbed = (make_trainer(tiny_model("qwen3"), **options) for _ in range(2))
    for each in (trainer, undisturbed):
        accumulate(each, ragged_groups)
        assert not each.optimizer_step().skipped
    before = state_of(trainer)
    accumulate(trainer, ragged_groups[:2], poison)
    with caplog.at_level(logging.ERROR):
        stats = trainer.optimizer_step()
    assert stats.skipped and "NO STEP WAS TAKEN" in caplog.text
    assert equal(before, state_of(trainer))
    assert trainer.optimizer.counts == StepCounts(taken=1, skipped=1, skipped_in_a_row=1)
    for each in (trainer, undisturbed):
        accumulate(each, ragged_groups)
        assert not each.optimizer_step().skipped
    assert equal(state_of(undisturbed), state_of(trainer))
    assert trainer.optimizer.counts == StepCounts(taken=2, skipped=1)


def test_learning_rate_follows_the_iteration_and_not_the_steps_that_were_taken(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, ragged_groups: list[Group]
) -> None:
    trainer = make_trainer(
        tiny_model("qwen3"), learning_rate=1e-2, warmup_iterations=4, steps_per_batch=2, old_policy="model"
    )
    rates = []
    for number in range(6):
        trainer.before_publish()
        accumulate(trainer, ragged_groups[:1], float("nan") if number in (1, 2) else None)
        rates.append(trainer.optimizer_step().learning_rate)
    assert rates == pytest.approx([0.25e-2, 0.25e-2, 0.5e-2, 0.5e-2, 0.75e-2, 0.75e-2])


def test_too_many_in_a_row_end_the_run_and_one_step_between_them_does_not(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, ragged_groups: list[Group]
) -> None:
    trainer = make_trainer(tiny_model("qwen3"))
    for poison in (*[float("inf")] * MAX_SKIPS_IN_A_ROW, None, *[float("inf")] * MAX_SKIPS_IN_A_ROW):
        accumulate(trainer, ragged_groups[:1], poison)
        assert trainer.optimizer_step().skipped == (poison is not None)
    accumulate(trainer, ragged_groups[:1], float("nan"))
    with pytest.raises(
        NonFiniteGradient, match="step 7: the gradient norm is nan; no step was taken, nor on the 3 befo"
    ):
        trainer.optimizer_step()


def test_a_resumed_run_goes_on_bit_for_bit_after_a_skipped_step(
    tiny_model: Callable[..., Path], ragged_groups: list[Group], parallel: Parallel, tmp_path: Path
) -> None:
    model, batches = str(tiny_model("qwen3")), tmp_path / "batches"
    # Its squares overflow in the norm, as a spike's do.
    spike = [replace(ragged_groups[0], rewards=(1e30, 0.0, -1e30))]
    batches.write_bytes(pickle.dumps([ragged_groups, spike, ragged_groups, ragged_groups[:3]]))
    sections = {"algorithm": {"scale_by_std": False}, "optimizer": {"clip_grad_norm": 1.0}}
    first = Run(model, str(tmp_path / "a"), 4, (2, 4), sections, batches=str(batches))(parallel)
    saved = tmp_path / "a/iteration-000002"
    again = Run(model, str(tmp_path / "b"), 4, (4,), sections, str(saved), str(batches))(parallel)
    assert read_manifest(saved)["num_skipped_in_a_row"] == 1
    assert first.optimizer.counts == again.optimizer.counts == StepCounts(taken=3, skipped=1)
    assert equal(state_of(first), state_of(again))
