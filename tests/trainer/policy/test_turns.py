"""What leaves a rank's device between two batches: everything; and training goes on with the same bits."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from async_rl.method.types import Group
from trainer.checkpoint.tensors import optimizer_tensors, snapshot
from trainer.policy.turns import Turns
from trainer.trainer import MegatronTrainer

CASES = {
    "grpo": {"kl_coef": 0.1},
    "host": {"kl_coef": 0.1, "frozen_weights": "host"},
    "old": {"old_policy": "lagged"},
    "ppo": {"name": "ppo", "kl_coef": 0.1, "steps_per_batch": 2, "old_policy": "model"},
}


def taking_turns(trainer: MegatronTrainer) -> MegatronTrainer:
    """As on a device: a CPU's memory is given back all the same."""
    trainer.turns = Turns(trainer._trained, trainer._frozen, torch.device("cpu"), takes_turns=True)
    return trainer


def views(trainer: MegatronTrainer) -> list[ShardedTensor]:
    """Masters and moments, as checkpoints find them."""
    return optimizer_tensors(trainer.models.policy_model, trainer.optimizer.parameter_states())


def values(tensors: Sequence[ShardedTensor]) -> list[torch.Tensor]:
    """As a checkpoint has them, wherever they are."""
    return [tensor.data for tensor in snapshot(tensors)]


def resident_bytes(trainer: MegatronTrainer) -> int:
    models = [model for model, _ in trainer._trained]
    tensors = [p.data for model in [*models, *trainer._frozen] for p in model.parameters()]
    tensors += [buffer.grad_data for model in models for buffer in [*model.buffers, *model.expert_parallel_buffers]]
    for _, optimizer in trainer._trained:
        tensors += [t for s in optimizer.parameter_states() for t in (s.master, *s.moments.values())]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_training_in_turns_has_the_same_bits(
    tiny_model: Callable[..., Path],
    make_trainer: Callable[..., MegatronTrainer],
    ragged_groups: list[Group],
    family: str,
    dtype: str,
    case: str,
) -> None:
    trainers = [make_trainer(tiny_model(family), dtype=dtype, **CASES[case]) for _ in range(2)]
    taking_turns(trainers[1])
    found = [views(trainer) for trainer in trainers]
    for _ in range(2):
        # Twice, as where a producer was lost before the first group.
        for trainer in trainers * 2:
            trainer.before_publish()
        away = trainers[1]
        assert resident_bytes(away) == 0 and away.turns.is_away
        # A checkpoint at this moment, as where a run is told to end while it waits for rollouts.
        assert all(map(torch.equal, *map(values, found)))
        # What a lost producer leaves is discarded.
        away.discard()
        group = ragged_groups[0]
        tokens = [list(response.token_ids) for response in group.responses]
        scores = [trainer.score(group.prompt.token_ids, tokens) for trainer in trainers]
        assert scores[0] == scores[1] and resident_bytes(away) == 0
        for _ in range(2 if case == "ppo" else 1):
            for trainer in trainers:
                trainer.accumulate([ragged_groups])
            steps = [trainer.optimizer_step() for trainer in trainers]
            assert steps[0].grad_norm == steps[1].grad_norm and steps[0].loss == steps[1].loss
    assert all(map(torch.equal, *map(values, found)))


def test_weights_that_are_changed_meanwhile_stay_changed_until_they_are_restored(
    tiny_model: Callable[..., Path], make_trainer: Callable[..., MegatronTrainer]
) -> None:
    trainer = taking_turns(make_trainer(tiny_model("qwen3")))
    trainer.before_publish()
    first = next(iter(trainer.models.policy_model.parameters()))

    def now() -> torch.Tensor:
        with trainer.turns.weights():
            return first.detach().clone()

    true = now()
    with trainer.turns.weights(changes=True):
        first.data.add_(1)
    assert torch.equal(now(), true + 1)
    with trainer.turns.weights(changes=True):
        first.data.copy_(true)
    trainer.turns.onload()
    assert torch.equal(first, true)


def test_a_canary_that_has_ended_leaves_nothing_to_restore_while_the_instances_have_the_device(
    tiny_model: Callable[..., Path], make_trainer: Callable[..., MegatronTrainer]
) -> None:
    trainer = taking_turns(make_trainer(tiny_model("qwen3")))
    tensors = views(trainer)
    true = [tensor.clone() for tensor in values(tensors)]
    trainer.before_publish()
    weights = trainer.canary_weights
    for strengths, are_changed in ((dict.fromkeys(weights.classes, 1), True), ({}, False)):
        with trainer.turns.weights(changes=True):
            weights.change(strengths)
        assert weights.are_changed == are_changed
        assert all(map(torch.equal, values(tensors), true)) != are_changed
    assert resident_bytes(trainer) == 0


def test_a_replica_without_groups_steps_all_the_same(
    tiny_model: Callable[..., Path], make_trainer: Callable[..., MegatronTrainer], ragged_groups: list[Group]
) -> None:
    trainer = taking_turns(make_trainer(tiny_model("qwen3")))
    trainer.before_publish()
    with pytest.raises(AssertionError, match="without an accumulated group"):
        trainer.optimizer_step()
    assert not trainer.turns.is_away and resident_bytes(trainer) > 0
    trainer.accumulate([ragged_groups])
    trainer.optimizer_step()
