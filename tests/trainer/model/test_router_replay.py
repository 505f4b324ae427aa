"""The trainer's experts are those that the sampler chose, in forward, backward and what is computed again."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from async_rl.checks.preflight.model import read_shape
from async_rl.config.trainer_section import TrainerSection
from async_rl.method.types import Group
from async_rl.shared.model_shape import ModelShape
from tests.support.trainer.given_routes import following, routes_of, with_random_routes
from tests.support.trainer.grpo_reference import sample_logprobs
from tests.support.trainer.layout_comparison import copy_of_weights, deviation, run_distributed
from tests.support.trainer.layout_worker import Job, make_trainer, run
from tests.trainer.conftest import by_checkpoint_name
from tests.trainer.test_forward_backward import Policy, hf_gradients_of, load, weighted
from trainer.batching.group_slice import slices_of
from trainer.batching.packing import pack
from trainer.forward_backward import PackedPass, TwoStagePass, make_passes
from trainer.parallel import Parallel
from trainer.policy.frozen_adapters import FrozenAdapters

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
TEMPERATURE = 0.7


def in_transformers(
    path: Path, groups: Sequence[Group], shape: ModelShape
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Every sample run alone, along its own routes."""
    settings = {"dtype": torch.float64, "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, **settings)
    logprobs = []
    for part in slices_of(groups):
        for number in part.indices:
            with following(model, routes_of(part.group, number, shape)):
                logprobs.append(sample_logprobs(model, part.group, part.group.responses[number], TEMPERATURE))
    whole = torch.cat(logprobs)
    weighted(whole, 0).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return whole.detach(), dict(by_checkpoint_name(gradients, model.config.model_type))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("max_tokens", [10_000, 6])
@pytest.mark.parametrize(
    "family",
    [
        "qwen3_moe",
        "deepseek_v3",
        *(pytest.param(each, marks=pytest.mark.nightly) for each in ("gpt_oss", "minimax_m2")),
    ],
)
def test_log_probs_and_gradients_along_given_routes_equal_transformers(
    family: str,
    max_tokens: int,
    recompute: str,
    tiny_model: Callable[..., Path],
    parallel: Parallel,
    ragged_groups: list[Group],
    rng: random.Random,
) -> None:
    groups = with_random_routes(ragged_groups, read_shape(tiny_model(family)), rng)
    require_equal(tiny_model(family), groups, max_tokens, recompute, parallel)


@pytest.mark.parametrize("max_tokens", [10_000, 6])
def test_turns_and_branches_with_prompts_of_their_own_follow_their_own_routes(
    max_tokens: int,
    tiny_model: Callable[..., Path],
    parallel: Parallel,
    rollout_groups: list[Group],
    rng: random.Random,
) -> None:
    assert any(len(group.responses_by_prompt) > 1 for group in rollout_groups)
    groups = with_random_routes(rollout_groups, read_shape(tiny_model("qwen3_moe")), rng)
    require_equal(tiny_model("qwen3_moe"), groups, max_tokens, "selective", parallel)


def require_equal(path: Path, groups: list[Group], max_tokens: int, recompute: str, parallel: Parallel) -> None:
    shape = read_shape(path)
    model = load(path, torch.float32, recompute, parallel)
    model.replays = True
    passes = make_passes(pack(groups, max_tokens), parallel, TEMPERATURE, max_tokens)
    assert {type(a_pass) for a_pass in passes} == ({PackedPass} if max_tokens == 10_000 else {PackedPass, TwoStagePass})
    seen: list[torch.Tensor] = []

    def loss_of(number: int, logprobs_N: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        seen.append(logprobs_N.detach())
        return weighted(logprobs_N, sum(map(len, seen[:-1])))

    for a_pass in passes:
        a_pass.train(Policy(model), loss_of)
    expected_logprobs, expected_gradients = in_transformers(path, groups, shape)
    tolerance = TOLERANCES[torch.float32]
    torch.testing.assert_close(torch.cat(seen).double(), expected_logprobs, rtol=tolerance, atol=tolerance)
    gradients = hf_gradients_of(model)
    assert set(gradients) == set(expected_gradients)
    for name, gradient in gradients.items():
        expected = expected_gradients[name]
        assert float((gradient.double() - expected).norm()) <= tolerance * float(expected.norm()), name


def test_without_it_the_routes_are_not_read(
    tiny_model: Callable[..., Path], parallel: Parallel, ragged_groups: list[Group], rng: random.Random
) -> None:
    path = tiny_model("qwen3_moe")
    model = load(path, torch.float32, "none", parallel)
    groups = with_random_routes(ragged_groups, read_shape(path), rng)

    def scored(some: Sequence[Group]) -> torch.Tensor:
        passes = make_passes([list(some)], parallel, TEMPERATURE, 10_000)
        with torch.no_grad():
            return torch.cat([logprobs for a_pass in passes for logprobs in a_pass.logprobs(model)])

    assert torch.equal(scored(groups), scored(ragged_groups))
    model.replays = True
    assert not torch.equal(scored(groups), scored(ragged_groups))


def test_the_base_below_adapters_chooses_its_own(tiny_model: Callable[..., Path], parallel: Parallel) -> None:
    """It shares the policy's weights, and stands for the reference."""
    model = load(tiny_model("qwen3_moe"), torch.float32, "none", parallel)
    model.replays = True
    for keeps in (False, True):
        with FrozenAdapters(model, keeps=keeps).resident() as resident:
            assert [chunk.replays for chunk in resident.chunks] == [keeps]
        assert model.replays


LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tensor_parallel": 2},
    "CP2": {"context_parallel": 2, "recompute": "selective"},
    "TP2 EP2": {"tensor_parallel": 2, "expert_parallel": 2, "recompute": "selective"},
    "PP2": {"pipeline_parallel": 2, "recompute": "full"},
    "PP2 VPP2": {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "recompute": "selective"},
    "DP2 EP2": {"expert_parallel": 2, "recompute": "full"},
}


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_layouts_train_along_the_same_routes(
    family: str,
    tiny_model: Callable[..., Path],
    parallel: Parallel,
    ragged_groups: list[Group],
    rng: random.Random,
    tmp_path: Path,
) -> None:
    """Several micro-batches are on their way when one is computed again; the reference chooses its own experts."""
    path = tiny_model(family, num_hidden_layers=4)
    groups = with_random_routes(ragged_groups, read_shape(path), rng)
    jobs = [
        Job(
            name=name,
            checkpoint=str(path),
            batches=[groups, groups[:0:-1]],
            layout={"micro_batch_tokens": 14, **layout},
            train={"router_replay": True},
        )
        for name, layout in LAYOUTS.items()
    ]
    run_distributed(jobs, 2, tmp_path, timeout_s=500)
    alone = replace(jobs[0], layout={})
    trainer = make_trainer(alone, parallel, TrainerSection())
    expected = run(alone, trainer, 0, 1)
    weights = copy_of_weights(trainer)
    for job in jobs:
        report = json.loads((tmp_path / f"{job.name}.json").read_text())
        for step, expected_step in zip(report["steps"], expected["steps"], strict=True):
            for key in ("loss", "grad_norm"):
                assert step[key] == pytest.approx(expected_step[key], rel=1e-5, abs=1e-6), (job.name, key)
        trained = load_file(tmp_path / f"{job.name}.safetensors")
        assert set(trained) == set(weights)
        assert all(deviation(trained[name], tensor) < 1e-5 for name, tensor in weights.items()), job.name
