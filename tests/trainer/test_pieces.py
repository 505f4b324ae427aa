"""Long groups in pieces: what is trained and proven is what one replica makes of the whole groups."""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from async_rl.checks.preflight.model import read_shape
from async_rl.config.train_section import TrainSection
from async_rl.method.group_proof import GroupProof, join_pieces
from async_rl.method.pieces import cut, may_be_cut
from async_rl.method.step_stats import StepStats
from async_rl.method.training_order import TrainingOrder
from async_rl.method.types import Batch, Group, RolloutFacts
from tests.support.finished_groups import Arriving
from tests.support.trainer.given_routes import with_random_routes
from tests.support.trainer.layout_comparison import deviation
from trainer.policy import optimizer
from trainer.trainer import MegatronTrainer

MakeTrainer = Callable[..., MegatronTrainer]
Trained: TypeAlias = tuple[list[StepStats], list[GroupProof], dict[str, torch.Tensor]]
TOLERANCE = 1e-5
CASES: dict[str, dict[str, Any]] = {
    "sequences": {"normalize": "sequence", "kl_coef": 0.1, "old_policy": "model"},
    "masked": {
        "mask_truncated": True,
        "overlong_tokens": 8,
        "max_response_tokens": 12,
        "importance": "sequence_truncate",
    },
    "gspo": {"name": "gspo", "clip_low": 0.02, "clip_high": 0.02},
    "batch deviation": {"name": "dr_grpo", "scale_by_std": "batch", "entropy_coef": 0.0},
    "weights": {"name": "pf_ppo", "old_policy": "lagged"},
    "critic": {"name": "ppo", "kl_coef": 0.05, "kl_in": "reward"},
    "totals": {"name": "reinforce_pp_baseline", "mode": "synchronous"},
}


@pytest.fixture
def groups(ragged_groups: list[Group]) -> list[Group]:
    """Some rollouts ended at a limit; one group of several rollouts has equal rewards."""
    rng = random.Random()
    return [
        replace(
            group, rollouts=tuple(RolloutFacts(status=rng.choice(("completed", "truncated"))) for _ in group.rewards)
        )
        for group in ragged_groups
    ]


def in_pieces(groups: Sequence[Group]) -> list[Group]:
    """Every group that has several rollouts in two or three pieces, all of them mixed."""
    rng = random.Random()
    pieces: list[Group] = []
    for rest in groups:
        for _ in range(rng.randrange(1, 3)):
            if may_be_cut(rest):
                piece, rest = cut(rest, rng.randrange(1, len(rest.rollouts)))
                pieces.append(piece)
        pieces.append(rest)
    return rng.sample(pieces, len(pieces))


def trained(trainer: MegatronTrainer, batches: Sequence[Sequence[Group]], mode: str, num_lost: int = 0) -> Trained:
    """With `num_lost` so many groups of each batch are trained in vain, as where the producer is lost amid a batch."""
    steps, rows = [], []
    for groups in batches:
        trainer.before_publish()
        for group in groups[:num_lost]:
            trainer.accumulate([[group]])
        trainer.discard()
        batch = Batch(0, {group.index: group.prompt for group in groups})
        order = TrainingOrder(Arriving(groups, [batch]), TrainSection(iterations=1, mode=mode), [batch])
        order.begin_mini_batch()
        own = [row for window in trainer.windows(order) for row in trainer.accumulate(window)]
        rows += sorted(join_pieces(own), key=lambda row: row.index)
        steps.append(trainer.optimizer_step())
    return steps, rows, {spec.name: tensor.clone() for spec, tensor in trainer.export.stream()}


def require_same(ours: Trained, whole: Trained) -> None:
    for step, expected in zip(ours[0], whole[0], strict=True):
        assert step.num_untrained == expected.num_untrained and not step.skipped
        for name in ("loss", "grad_norm"):
            assert deviation(getattr(step, name), getattr(expected, name)) < TOLERANCE, name
        assert step.metrics.keys() == expected.metrics.keys()
        for name, value in expected.metrics.items():
            torch.testing.assert_close(step.metrics[name], value, rtol=1e-4, atol=1e-4, equal_nan=True)
    for row, expected_row in zip(ours[1], whole[1], strict=True):
        assert row.all_gaps.count == expected_row.all_gaps.count
        assert row.all_gaps.rms == pytest.approx(expected_row.all_gaps.rms, rel=1e-4)
        # Log-probs differ by rounding, and what is shown of them depends on the groups that were trained before.
        but = {"gaps": (), "shown_logprobs": (), "num_corrected": 0, "num_pieces": 1}
        assert asdict(row) | but == asdict(expected_row) | but
    assert max(deviation(ours[2][name], tensor) for name, tensor in whole[2].items()) < TOLERANCE


@pytest.mark.parametrize("max_tokens", [14, 10_000])
@pytest.mark.parametrize("case", list(CASES))
def test_losses_metrics_proofs_and_weights_of_pieces_are_those_of_groups(
    case: str,
    max_tokens: int,
    tiny_model: Callable[..., Path],
    make_trainer: MakeTrainer,
    groups: list[Group],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(optimizer, "EPS", 1e-3)
    options = {"micro_batch_tokens": max_tokens, **CASES[case]}
    mode = options.get("mode", "periodic")
    path = tiny_model("qwen3", tied=True)
    whole = trained(make_trainer(path, **options), [groups, groups], mode)
    trainer = make_trainer(path, **options)
    assert trainer.cuts_groups
    ours = trained(trainer, [in_pieces(groups), in_pieces(groups)], mode)
    require_same(ours, whole)


@pytest.mark.parametrize("max_tokens", [14, 10_000])
@pytest.mark.parametrize("has_turns", [False, True])
def test_pieces_are_trained_along_the_routes_of_their_groups(
    has_turns: bool,
    max_tokens: int,
    tiny_model: Callable[..., Path],
    make_trainer: MakeTrainer,
    groups: list[Group],
    rollout_groups: list[Group],
    rng: random.Random,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of turns and branches, as far as these follow the group's own prompt: others are not cut; and where the
    producer was lost after some of a group's pieces, and others come anew."""
    monkeypatch.setattr(optimizer, "EPS", 1e-3)
    path = tiny_model("qwen3_moe")
    if has_turns:
        groups = [
            replace(group, responses=tuple(replace(response, prompt_ids=None) for response in group.responses))
            for group in rollout_groups
        ]
    groups = with_random_routes(groups, read_shape(path), rng)
    options = {"micro_batch_tokens": max_tokens, "kl_coef": 0.1, "router_replay": True}
    whole = trained(make_trainer(path, **options), [groups, groups], "periodic")
    first = in_pieces(groups)
    assert len(first) > len(groups)
    for num_lost in (0, 2):
        ours = trained(make_trainer(path, **options), [first, in_pieces(groups)], "periodic", num_lost)
        require_same(ours, whole)
    own = trained(make_trainer(path, **options | {"router_replay": False}), [groups, groups], "periodic")
    assert max(deviation(own[2][name], tensor) for name, tensor in whole[2].items()) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("options", "cuts"),
    [
        ({"name": "online_dpo"}, False),
        ({"name": "grpo", "kl_coef": 0.1, "kl_in": "reward"}, False),
        ({"name": "grpo", "kl_coef": 0.1}, True),
    ],
)
def test_what_needs_the_tokens_of_all_rollouts_keeps_groups_whole(
    options: dict[str, Any], cuts: bool, tiny_model: Callable[..., Path], make_trainer: MakeTrainer
) -> None:
    assert make_trainer(tiny_model("qwen3"), **options).cuts_groups == cuts
