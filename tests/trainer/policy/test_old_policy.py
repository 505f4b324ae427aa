"""Old policies of their own: ratio and clip against an implementation in float64, and where weights wait."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_rl.config.train_section import TrainSection
from async_rl.config.trainer_section import TrainerSection
from async_rl.method.training_order import TrainingOrder
from async_rl.method.types import Batch, Group
from tests.support.finished_groups import Arriving
from tests.support.trainer import layout_worker
from tests.support.trainer.grpo_reference import expected_advantages, rollouts_of, sample_logprobs
from tests.support.trainer.layout_worker import Job
from trainer.parallel import Parallel
from trainer.policy.frozen_model import FrozenModel

CLIP_LOW, CLIP_HIGH = 0.02, 0.05
"""Narrow, so that a step of Adam takes many ratios beyond it."""

LEARNING_RATE = 3e-3


def logprobs_of(model: PreTrainedModel, group: Group) -> list[torch.Tensor]:
    return [sample_logprobs(model, group, response, 1.0) for response in group.responses]


def reference_steps(
    path: Path, batches: Sequence[Sequence[Group]], steps_per_batch: int, lagged: bool
) -> Iterator[tuple[float, float, float]]:
    """(loss, gradient norm, clip fraction) of every step: clipped GRPO on unshared samples, AdamW, in float64."""
    policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    old = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), LEARNING_RATE, (0.9, 0.95), 1e-3, weight_decay=0.0)
    for groups in batches:
        if not lagged:
            old.load_state_dict(policy.state_dict())
        by_index = {group.index: group for group in groups}
        for part in Batch(0, {i: g.prompt for i, g in by_index.items()}).split(steps_per_batch):
            losses, clipped, count = [], 0, 0
            for group in (by_index[i] for i in part.prompts):
                with torch.no_grad():
                    old_logprobs = logprobs_of(old, group)
                logprobs = logprobs_of(policy, group)
                for advantage, of in zip(expected_advantages(group), rollouts_of(group), strict=True):
                    ratio = (torch.cat([logprobs[i] for i in of]) - torch.cat([old_logprobs[i] for i in of])).exp()
                    inside = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
                    losses.append(-torch.minimum(ratio * advantage, inside * advantage).sum())
                    # Beyond the range on the side where the advantage would take it further.
                    clipped += int(((ratio - inside) * advantage > 0).sum())
                    count += len(ratio)
            loss = torch.stack(losses).sum() / count
            optimizer.zero_grad()
            loss.backward()
            norm = float(torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0))
            if lagged:
                old.load_state_dict(policy.state_dict())
            optimizer.step()
            yield float(loss.detach()), norm, clipped / count


@pytest.mark.parametrize("groups", ["ragged_groups", "rollout_groups"])
@pytest.mark.parametrize(
    ("old_policy", "steps_per_batch", "placement"),
    [("model", 3, "device"), ("model", 2, "host"), ("lagged", 1, "device"), ("model", 1, "device")],
)
def test_ratio_and_clip_equal_a_reference_implementation(
    old_policy: str,
    steps_per_batch: int,
    placement: str,
    tiny_model: Callable[..., Path],
    parallel: Parallel,
    groups: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tiny_model("qwen3", tied=True)
    some: list[Group] = request.getfixturevalue(groups)
    batches = [some, some[::-1], some]
    job = Job(
        "",
        str(path),
        batches,
        {},
        {"kl_coef": 0.0, "old_policy": old_policy, "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH},
        {"steps_per_batch": steps_per_batch},
    )
    monkeypatch.setattr(layout_worker, "LEARNING_RATE", LEARNING_RATE)
    section = TrainerSection(micro_batch_tokens=24, frozen_weights=placement)
    report = layout_worker.run(job, layout_worker.make_trainer(job, parallel, section), 0, 1)
    expected = list(reference_steps(path, batches, steps_per_batch, lagged=old_policy == "lagged"))
    assert len(report["steps"]) == len(expected) == 3 * steps_per_batch
    for step, (loss, norm, clip_fraction) in zip(report["steps"], expected, strict=True):
        assert step["loss"] == pytest.approx(loss, rel=1e-3, abs=1e-5)
        assert step["grad_norm"] == pytest.approx(norm, rel=1e-3)
        assert step["metrics"]["clip_fraction"] == pytest.approx(clip_fraction, abs=0.02)
    if old_policy == "lagged" or steps_per_batch > 1:
        assert max(clip_fraction for _, _, clip_fraction in expected) > 0.03


def test_gap_is_that_of_the_weights_that_sampled_in_every_step(
    tiny_model: Callable[..., Path], parallel: Parallel, ragged_groups: list[Group]
) -> None:
    path = tiny_model("qwen3", tied=True)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        sampled = [
            replace(
                group,
                responses=tuple(
                    replace(response, logprobs=tuple(logprobs.tolist()))
                    for response, logprobs in zip(group.responses, logprobs_of(model, group), strict=True)
                ),
            )
            for group in ragged_groups
        ]
    job = Job("", str(path), [sampled], {}, {"old_policy": "model"}, {"steps_per_batch": 3})
    report = layout_worker.run(job, layout_worker.make_trainer(job, parallel, TrainerSection()), 0, 1)
    assert max(row["max_logprob_gap"] for rows in report["rows"] for row in rows) < 1e-4


def test_no_old_model_is_kept_where_the_policy_is_its_own(
    tiny_model: Callable[..., Path], make_trainer: Callable[..., object]
) -> None:
    models = make_trainer(tiny_model("qwen3"), old_policy="reuse").models
    assert models.old is None and models.reference is None


def test_frozen_weights_on_the_host_leave_the_device_between_uses(
    tiny_model: Callable[..., Path], make_trainer: Callable[..., object], ragged_groups: list[Group]
) -> None:
    trainer = make_trainer(tiny_model("qwen3"), kl_coef=0.1, frozen_weights="host")
    reference: FrozenModel = trainer.models.reference

    def num_bytes() -> int:
        return sum(parameter.untyped_storage().nbytes() for parameter in reference.parameters())

    policy = {name: p.detach().clone() for name, p in trainer.models.policy_model.named_parameters()}
    assert num_bytes() == 0
    with reference.resident() as model:
        assert all(torch.equal(p, policy[name]) for name, p in model.named_parameters())
    assert num_bytes() == 0
    trainer.accumulate([ragged_groups])
    assert num_bytes() == 0


def test_frozen_weights_on_the_host_are_copied_once_for_all_groups_that_wait(
    tiny_model: Callable[..., Path],
    make_trainer: Callable[..., object],
    ragged_groups: list[Group],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies = []
    resident = FrozenModel.resident
    monkeypatch.setattr(FrozenModel, "resident", lambda frozen: (copies.append(frozen), resident(frozen))[1])
    batch = Batch(0, {group.index: group.prompt for group in ragged_groups})
    for placement, num_copies in (("device", len(ragged_groups)), ("host", 1)):
        trainer = make_trainer(tiny_model("qwen3"), kl_coef=0.1, frozen_weights=placement, micro_batch_tokens=1)
        order = TrainingOrder(
            Arriving(ragged_groups, counts=repeat(len(ragged_groups))), TrainSection(iterations=1), [batch]
        )
        order.begin_mini_batch()
        copies.clear()
        rows = [row for window in trainer.windows(order) for row in trainer.accumulate(window)]
        assert len(rows) == len(ragged_groups) and len(copies) == num_copies
