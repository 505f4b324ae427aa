"""The whole loop on the real trainer: what periodic training may change against synchronous training, and what not."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from async_rl.config.train_section import TrainSection
from async_rl.loop import Window, train
from async_rl.method.group_proof import GroupProof
from async_rl.method.ledger import Ledger
from async_rl.method.proof.gap_limits import NoiseLimits
from async_rl.method.step_stats import StepStats
from async_rl.method.training_order import TrainingOrder
from async_rl.method.types import Group, Publication
from async_rl.records.recorder import Recorder
from tests.support.trainer.replayed_rollouts import ReplayedRolloutSource
from trainer.policy import optimizer
from trainer.trainer import MegatronTrainer

NUM_ITERATIONS = 3


class UnpublishedTrainer:
    """The loop's trainer without a pool: every version is the one that the groups claim."""

    dp_rank = 0
    num_replicas = 1

    def __init__(self, megatron: MegatronTrainer) -> None:
        self._megatron = megatron

    def publish_weights(self) -> Publication:
        return Publication("v0", "", (), 0, 0.0)

    def windows(self, order: TrainingOrder) -> Iterator[Window]:
        return self._megatron.windows(order)

    def accumulate(self, window: Window) -> list[GroupProof]:
        return [replace(row, num_responses=1, rewards=row.rewards[:1]) for row in self._megatron.accumulate(window)]

    def gather(self, rows: Sequence[GroupProof]) -> list[GroupProof]:
        return list(rows)

    def optimizer_step(self) -> StepStats:
        return self._megatron.optimizer_step()


@pytest.fixture
def trained(
    tiny_model: Callable[..., Path],
    make_trainer: Callable[..., MegatronTrainer],
    ragged_groups: list[Group],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Mapping[str, torch.Tensor]]:
    """`trained(mode=..., order=..., arrival=seed)` -> the weights after a few iterations."""

    def run(mode: str, order: str, arrival: int) -> Mapping[str, torch.Tensor]:
        # Adam divides a gradient by its own size: with less, rounding decides where it is nearly zero.
        monkeypatch.setattr(optimizer, "EPS", 1e-3)
        megatron = make_trainer(
            tiny_model("qwen3", tied=True),
            kl_coef=0.1,
            learning_rate=1e-3,
            iterations=NUM_ITERATIONS,
        )
        rollouts = ReplayedRolloutSource(ragged_groups, random.Random(arrival), all_at_once=mode == "synchronous")
        config = TrainSection.model_validate({"iterations": NUM_ITERATIONS, "mode": mode, "order": order})
        ledger = Ledger(None, responses_per_prompt=1, limits=NoiseLimits(float("inf")))
        train(config, UnpublishedTrainer(megatron), rollouts, rollouts, ledger, Recorder())
        return {spec.name: tensor.clone() for spec, tensor in megatron.export.stream()}

    return run


def test_periodic_training_equals_synchronous_training_up_to_the_order_of_summation(
    trained: Callable[..., Mapping[str, torch.Tensor]],
) -> None:
    synchronous = trained(mode="synchronous", order="prompt", arrival=1)
    periodic = trained(mode="periodic", order="completion", arrival=2)
    for name, tensor in synchronous.items():
        torch.testing.assert_close(
            periodic[name], tensor, rtol=1e-6, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_in_prompt_order_periodic_training_equals_synchronous_training_bit_for_bit(
    trained: Callable[..., Mapping[str, torch.Tensor]],
) -> None:
    synchronous = trained(mode="synchronous", order="prompt", arrival=3)
    periodic = trained(mode="periodic", order="prompt", arrival=4)
    assert all(torch.equal(periodic[name], tensor) for name, tensor in synchronous.items())
