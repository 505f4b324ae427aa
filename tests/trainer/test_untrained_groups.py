"""Groups whose rewards are all equal have no gradient: no backward pass is spent on them, and nothing else changes."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from async_rl.config.trainer_section import TrainerSection
from async_rl.method.algorithms.grpo import GRPO
from async_rl.method.group_proof import GroupProof
from async_rl.method.step_stats import StepStats
from async_rl.method.types import Group
from tests.support.trainer import layout_worker
from tests.support.trainer.layout_worker import Job
from trainer.forward_backward import PackedPass, TwoStagePass
from trainer.parallel import Parallel
from trainer.policy import optimizer
from trainer.trainer import MegatronTrainer

MakeTrainer = Callable[..., MegatronTrainer]


def equal(group: Group, reward: float = 0.7) -> Group:
    return replace(group, rewards=(reward,) * len(group.rewards))


@pytest.fixture
def mixed(ragged_groups: list[Group]) -> list[Group]:
    """Three of six have a gradient; those without are a long one, one of a single response, and a small one."""
    rewards = {0: (0.0, 1.0, 0.5), 3: (0.5, 0.0, 1.0, 0.0), 5: (1.0, 0.0)}
    return [
        replace(group, rewards=rewards[group.index]) if group.index in rewards else equal(group)
        for group in ragged_groups
    ]


def steps(
    trainer: MegatronTrainer, batches: Sequence[Sequence[Sequence[Group]]]
) -> tuple[list[StepStats], list[GroupProof], dict[str, torch.Tensor]]:
    """Figures and rows of each step, and the weights in the end; a batch is a window of micro-batches."""
    stats, rows = [], []
    for window in batches:
        trainer.before_publish()
        rows += trainer.accumulate(window)
        stats.append(trainer.optimizer_step())
    return stats, rows, {spec.name: tensor.clone() for spec, tensor in trainer.export.stream()}


@pytest.mark.parametrize("old_policy", ["reuse", "model", "lagged"])
@pytest.mark.parametrize(("max_tokens", "normalize"), [(10_000, "token"), (14, "sequence")])
def test_loss_gradient_metrics_and_weights_are_those_of_training_all_groups(
    old_policy: str,
    max_tokens: int,
    normalize: str,
    tiny_model: Callable[..., Path],
    make_trainer: MakeTrainer,
    mixed: list[Group],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    windows = [[mixed] if max_tokens > 1000 else [[group] for group in mixed]] * 3
    options = {
        "old_policy": old_policy,
        "normalize": normalize,
        "micro_batch_tokens": max_tokens,
        "clip_low": 0.02,
        "clip_high": 0.05,
    }
    monkeypatch.setattr(optimizer, "EPS", 1e-3)
    ours = steps(make_trainer(tiny_model("qwen3", tied=True), **options), windows)
    monkeypatch.setattr(GRPO, "has_gradient", lambda *_: True)
    expected = steps(make_trainer(tiny_model("qwen3", tied=True), **options), windows)
    for stats, wanted in zip(ours[0], expected[0], strict=True):
        assert (stats.num_untrained, wanted.num_untrained) == (3, 0)
        assert stats.loss == pytest.approx(wanted.loss, rel=1e-5, abs=1e-7)
        assert stats.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
        # One token more or less beyond the clip is rounding.
        assert stats.metrics == pytest.approx(wanted.metrics, rel=1e-5, abs=0.012)
    for row, wanted_row in zip(ours[1], expected[1], strict=True):
        assert row.all_gaps.largest == pytest.approx(wanted_row.all_gaps.largest, abs=1e-4)
        for shown, wanted_shown in zip(row.shown_logprobs, wanted_row.shown_logprobs, strict=True):
            assert shown == pytest.approx(wanted_shown, abs=1e-4)
        assert replace(row, gaps=(), shown_logprobs=()) == replace(wanted_row, gaps=(), shown_logprobs=())
    for name, tensor in expected[2].items():
        torch.testing.assert_close(ours[2][name], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


def test_no_backward_is_run_for_them(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, mixed: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []
    for kind in (PackedPass, TwoStagePass):
        train = kind.train

        def noted(self: object, *arguments: object, train: Callable[..., None] = train) -> None:
            trained.extend(part.group.index for batch in self.micro_batches for part in batch.slices)
            train(self, *arguments)

        monkeypatch.setattr(kind, "train", noted)
    for window, kl_coef in (([mixed[:3], mixed[3:]], 0.0), ([[g] for g in mixed], 0.0), ([mixed], 0.1)):
        trained.clear()
        trainer = make_trainer(tiny_model("qwen3"), micro_batch_tokens=20, kl_coef=kl_coef)
        trainer.accumulate(window)
        assert sorted(set(trained)) == ([0, 3, 5] if kl_coef == 0 else [0, 1, 2, 3, 4, 5])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_without_any_gradient_is_a_step_on_momentum_alone(
    dtype: str,
    tiny_model: Callable[..., Path],
    make_trainer: MakeTrainer,
    mixed: list[Group],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    windows = [[[group] for group in mixed], [[equal(group)] for group in mixed]]
    options = {"dtype": dtype}
    (_, second), rows, weights = steps(make_trainer(tiny_model("qwen3"), **options), windows)
    assert second.grad_norm == 0.0 and second.loss == 0.0 and second.num_untrained == 6 and not second.skipped
    assert second.metrics["entropy"] > 0 and len(rows) == 12
    _, _, after_first = steps(make_trainer(tiny_model("qwen3"), **options), windows[:1])
    assert any(not torch.equal(weights[name], tensor) for name, tensor in after_first.items())
    # A backward pass on a loss of nothing but zeros adds zeros.
    monkeypatch.setattr(GRPO, "has_gradient", lambda *_: True)
    _, _, expected = steps(make_trainer(tiny_model("qwen3"), **options), windows)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


LAYOUTS = {
    "TP2": ("dense", {"tensor_parallel": 2}),
    "CP2": ("dense", {"context_parallel": 2}),
    "PP2": ("dense", {"pipeline_parallel": 2}),
    "DP2": ("dense", {}),
    "EP2 over two replicas": ("moe", {"expert_parallel": 2}),
}


@pytest.mark.nightly
@pytest.mark.distributed
def test_layouts_agree_on_what_is_not_trained(
    tiny_model: Callable[..., Path], parallel: Parallel, mixed: list[Group], tmp_path: Path
) -> None:
    """One replica has no gradient in the first batch, nobody has one in the second; that of the fourth overflows."""
    paths = {"dense": str(tiny_model("qwen3", tied=True)), "moe": str(tiny_model("qwen3_moe"))}
    one_sided = [equal(group) if group.index % 2 else replace(group, rewards=_spread(group)) for group in mixed]
    huge = [replace(group, rewards=tuple(1e30 * reward for reward in _spread(group))) for group in mixed]
    batches = [one_sided, [equal(group) for group in mixed], mixed, huge, mixed]
    algorithm = {"kl_coef": 0.0, "scale_by_std": False}
    jobs = [
        Job(
            name=name,
            checkpoint=paths[model],
            batches=batches,
            layout={"micro_batch_tokens": 14, **layout},
            algorithm=algorithm,
        )
        for name, (model, layout) in LAYOUTS.items()
    ]
    expected = {}
    for model, path in paths.items():
        job = Job(name="", checkpoint=path, batches=batches, layout={}, algorithm=algorithm)
        trainer = layout_worker.make_trainer(job, parallel, TrainerSection())
        report = layout_worker.run(job, trainer, 0, 1)
        expected[model] = report["steps"], {spec.name: tensor.clone() for spec, tensor in trainer.export.stream()}
    (tmp_path / "jobs").write_bytes(pickle.dumps(jobs))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run(
        [*torchrun, "-m", layout_worker.__name__, tmp_path / "jobs", tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"},
        timeout=240,
        check=True,
    )
    for name, (model, _) in LAYOUTS.items():
        wanted, weights = expected[model]
        actual = json.loads((tmp_path / f"{name}.json").read_text())["steps"]
        assert [step["skipped"] for step in actual] == [False, False, False, True, False], name
        for step, wanted_step in zip(actual, wanted, strict=True):
            assert step["num_untrained"] == wanted_step["num_untrained"], name
            if not step["skipped"]:
                assert step["loss"] == pytest.approx(wanted_step["loss"], rel=1e-4, abs=1e-6), name
                assert step["grad_norm"] == pytest.approx(wanted_step["grad_norm"], rel=1e-4, abs=1e-6), name
        saved = load_file(tmp_path / f"{name}.safetensors")
        for tensor_name, tensor in weights.items():
            torch.testing.assert_close(saved[tensor_name], tensor, rtol=1e-5, atol=1e-5, msg=f"{name}, {tensor_name}")


def _spread(group: Group) -> tuple[float, ...]:
    return tuple(float(i % 2) for i in range(len(group.rewards)))
