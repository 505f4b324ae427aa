"""The trainer's fixtures: one process group, random groups, and an independent GRPO on unshared samples."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from transformers import AutoModelForCausalLM

from async_rl.config.adapter_section import AdapterSection
from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.config.sections import ModelSection
from async_rl.config.train_section import OptimizerSection, TrainSection
from async_rl.config.trainer_section import TrainerSection
from async_rl.method.types import Group
from tests.support.fresh_seed import fresh_seed
from tests.support.groups import random_group
from tests.support.trainer.branched_groups import branched_groups
from tests.support.trainer.grpo_reference import (
    expected_advantages,
    rollouts_of,
    sample_distributions,
    sample_logprobs,
    sampled_tokens,
)
from trainer.devices import Device
from trainer.hf.weights import weight_map
from trainer.parallel import Parallel
from trainer.trainer import MegatronTrainer

VOCAB_SIZE = 96
RAGGED = ((7, (5, 1, 9)), (1, (1, 4)), (12, (6,)), (3, (1, 1, 1, 1)), (4, (8, 2, 2, 11)))
"""(prompt tokens, response tokens of each response) of five groups: P = 1, G = 1 and length-1 responses among them."""


@pytest.fixture(autouse=True)
def closed_groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends the process groups that a test opens, each of which has files open.

    `Checkpoints` leaves its group to the end of the run's process, which for tests is the same one.
    """
    if "parallel" in request.fixturenames:
        request.getfixturevalue("parallel")
    opened: list[dist.ProcessGroup] = []
    new_group = dist.new_group

    def noted(*args: Any, **options: Any) -> dist.ProcessGroup:
        opened.append(new_group(*args, **options))
        return opened[-1]

    monkeypatch.setattr(dist, "new_group", noted)
    yield
    for group in opened:
        dist.destroy_process_group(group)


@pytest.fixture(scope="session")
def make_trainer(parallel: Parallel) -> Callable[..., MegatronTrainer]:
    """`make_trainer(path, kl_coef=0.1, temperature=0.7)`; settings go to the section that has them, `options` to the
    algorithm."""

    def make(
        path: Path,
        *,
        dtype: str = "float32",
        device: Device | None = None,
        adapter: AdapterSection | None = None,
        publishes_adapters: bool = False,
        **options: float | str,
    ) -> MegatronTrainer:
        def section(kind: type) -> dict[str, float | str]:
            return {name: value for name, value in options.items() if name in kind.model_fields}

        return MegatronTrainer(
            parallel if device is None else replace(parallel, device=device),
            TrainerSection(**section(TrainerSection)),
            ModelSection(path=str(path), dtype=dtype),
            RolloutSection(**{name: value for name, value in section(RolloutSection).items() if name != "options"}),
            AlgorithmSection(**section(AlgorithmSection)),
            OptimizerSection(**{"learning_rate": 1e-2} | section(OptimizerSection)),
            TrainSection(**{"iterations": 10} | section(TrainSection)),
            adapter or AdapterSection(),
            publishes_adapters=publishes_adapters,
        )

    return make


@pytest.fixture(scope="session")
def ragged_groups() -> list[Group]:
    """Fresh tokens in every session."""
    return draw_ragged_groups(random.Random(fresh_seed()))


def draw_ragged_groups(rng: random.Random) -> list[Group]:
    """Five ragged groups and one whose rewards are all equal."""
    groups = [
        random_group(i, prompt_len, lens, rng, VOCAB_SIZE, [rng.choice((0.0, 0.5, 1.0)) for _ in lens])
        for i, (prompt_len, lens) in enumerate(RAGGED)
    ]
    groups[0] = replace(groups[0], rewards=(0.0, 1.0, 0.5))
    groups[4] = replace(groups[4], rewards=(1.0, 0.0, 0.0, 0.5))
    return [*groups, random_group(len(groups), 5, (3, 4), rng, VOCAB_SIZE, rewards=(1.0, 1.0))]


@pytest.fixture(scope="session")
def rollout_groups() -> list[Group]:
    """Groups of multi-turn rollouts with branches, every kind among them; fresh tokens as in `ragged_groups`."""
    return branched_groups(random.Random(fresh_seed()))


@dataclass(frozen=True)
class Expected:
    logprobs: list[list[tuple[float, ...]]]
    loss: float
    entropy: float
    gradients: dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def grpo_in_transformers() -> Callable[..., Expected]:
    """GRPO of a batch in float64: transformers and autograd, one unpadded sample at a time."""

    def run(
        policy_path: Path,
        reference_path: Path,
        groups: Sequence[Group],
        *,
        temperature: float = 1.0,
        kl_coef: float = 0.0,
        normalize: str = "token",
        adapter: Path | None = None,
    ) -> Expected:
        """With `adapter`, a peft directory, the policy is peft's, in which nothing else is trained."""
        # The faster ways to run experts know no float64.
        settings = {"dtype": torch.float64, "experts_implementation": "eager"}
        policy = AutoModelForCausalLM.from_pretrained(policy_path, **settings)
        reference = AutoModelForCausalLM.from_pretrained(reference_path, **settings)
        if adapter is not None:
            policy = PeftModel.from_pretrained(policy, adapter, is_trainable=True, autocast_adapter_dtype=False)
            policy.to(torch.float64)
        all_logprobs, loss, count, entropies = [], torch.zeros((), dtype=torch.float64), 0, []
        for group in groups:
            all_logprobs.append([])
            for indices, advantage in zip(rollouts_of(group), expected_advantages(group), strict=True):
                rollout, length = torch.zeros((), dtype=torch.float64), 0
                for response in (group.responses[i] for i in indices):
                    chosen = sampled_tokens(response)[:, None]
                    distributions = sample_distributions(policy, group, response, temperature)
                    entropies += (-distributions.exp() * distributions).sum(1).tolist()
                    logprobs = distributions.gather(1, chosen)[:, 0]
                    with torch.no_grad():
                        ref = sample_logprobs(reference, group, response, temperature)
                    kl = (ref - logprobs).exp() - (ref - logprobs) - 1
                    rollout = rollout + (-advantage * (logprobs - logprobs.detach()).exp() + kl_coef * kl).sum()
                    length += len(logprobs)
                    all_logprobs[-1].append(tuple(logprobs.tolist()))
                loss = loss + (rollout / length if normalize == "sequence" else rollout)
                count += 1 if normalize == "sequence" else length
        (loss / count).backward()
        found = {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
        gradients = dict(by_checkpoint_name(found, policy.config.model_type))
        return Expected(all_logprobs, float(loss.detach() / count), sum(entropies) / len(entropies), gradients)

    return run


def by_checkpoint_name(tensors: dict[str, torch.Tensor], model_type: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Each expert's matrices by themselves, which transformers has in one tensor, but for gpt-oss; under the names of
    Qwen's, if the family has no others."""
    parts_of = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    if model_type == "minimax_m2":
        parts_of = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
        tensors = {name.replace(".mlp.", ".block_sparse_moe."): tensor for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        layer, _, kind = name.partition(".experts.")
        parts = parts_of.get(kind)
        if parts is None or model_type == "gpt_oss":
            yield name, tensor
            continue
        for number, expert in enumerate(tensor):
            for part, matrix in zip(parts, expert.chunk(len(parts)), strict=True):
                yield f"{layer}.experts.{number}.{part}.weight", matrix


@pytest.fixture(scope="session")
def hf_gradients() -> Callable[[MegatronTrainer], dict[str, torch.Tensor]]:
    """The summed gradients that a trainer holds, under Hugging Face names."""

    def read(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
        model = trainer.models.policy_model
        gradients = {name: parameter.main_grad for name, parameter in model.named_parameters()}
        return {
            name: part.clone()
            for entry in weight_map(model.shape)
            for name, part in zip(entry.hf_shapes, entry.fusion.split(entry.of(gradients)), strict=True)
        }

    return read
