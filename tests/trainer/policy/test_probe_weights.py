"""The probe in bfloat16 with real models: engines with other weights than the trainer's are found, sound ones never.

The engine is transformers in this process, the trainer Megatron. Both compute in bfloat16, each in its own order.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from async_rl.config.pool_section import PublishSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.method.proof.gap_limits import noise_scale
from async_rl.rollouts.publish.probe import MAX_LENGTH, Probe
from async_rl.rollouts.publish.trial_request import NUM_TOKENS
from tests.support.fresh_seed import fresh_seed
from tests.support.members import ready_member
from trainer.trainer import MegatronTrainer

Change = Callable[[str, torch.Tensor], torch.Tensor]
"""(name, what the engine received) -> what it computes with."""

MODELS = {"dense": ("qwen3", {}), "mixture of experts": ("qwen3_moe", {})}
SHARPNESS = 8.0
"""By which the head is multiplied: a model at random spreads over all tokens, whatever its weights are."""

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def of_another_version(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """As far away as fifty steps of AdamW at a learning rate of 1e-3."""
    return tensor + 0.05 * torch.randn(tensor.shape).sign() if tensor.ndim > 1 else tensor


def with_permuted_ranks(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The parts of two tensor-parallel ranks are exchanged in the rows of every layer's gates and up projections."""
    if any(part in name for part in ("gate_proj", "v_proj")):
        return tensor.roll(tensor.shape[0] // 2, 0)
    return tensor


def with_a_stale_adapter(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Without the product of rank 4 that was trained since: as large as the weights."""
    if not any(part in name for part in PROJECTIONS) or tensor.ndim != 2:
        return tensor
    delta = torch.randn(tensor.shape[0], 4) @ torch.randn(4, tensor.shape[1])
    return tensor - (tensor.float().norm() / delta.norm() * delta).to(tensor.dtype)


FAULTS: dict[str, Change] = {
    "another version": of_another_version,
    "permuted ranks": with_permuted_ranks,
    "a stale adapter": with_a_stale_adapter,
}


class Engine:
    def __init__(self, trainer: MegatronTrainer, change: Change = lambda name, tensor: tensor) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(trainer.checkpoint, dtype=torch.bfloat16).eval()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(change(name, parameter.detach()))

    @torch.no_grad()
    def sample(self, prompt: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        """NUM_TOKENS tokens at temperature 1, in responses of MAX_LENGTH."""
        ids = torch.tensor([prompt] * (NUM_TOKENS // MAX_LENGTH))
        for _ in range(MAX_LENGTH):
            logits = self.model(ids).logits[:, -1].float()
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        answers = ids[:, len(prompt) :]
        logprobs = self.model(ids).logits[:, len(prompt) - 1 : -1].float().log_softmax(-1)
        own = logprobs.gather(-1, answers[..., None]).squeeze(-1)
        return [(tuple(a), tuple(b)) for a, b in zip(answers.tolist(), own.tolist(), strict=True)]


@pytest.mark.parametrize("num_publishes", [6, pytest.param(25, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", MODELS)
def test_sound_engines_never_fail_in_bfloat16_and_planted_faults_do(
    kind: str,
    num_publishes: int,
    tiny_model: Callable[..., Path],
    make_trainer: Callable[..., MegatronTrainer],
    tmp_path: Path,
) -> None:
    fresh_seed()
    family, options = MODELS[kind]
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family, tied=False, **options))
    with torch.no_grad():
        model.lm_head.weight *= SHARPNESS
    model.save_pretrained(tmp_path)
    trainer = make_trainer(tmp_path, dtype="bfloat16")
    engines = {name: Engine(trainer, FAULTS[name]) for name in FAULTS} | {"sound": Engine(trainer)}
    members = {name: ready_member(name.replace(" ", "-")) for name in engines}
    gaps: dict[str, list[float]] = {name: [] for name in engines}
    failed = dict.fromkeys(engines, 0)
    for _ in range(num_publishes):
        prompt = torch.randint(model.config.vocab_size, (12,)).tolist()
        probe = Probe(PublishSection(), RolloutSection(), prompt, noise_scale("bfloat16"))
        answers = {members[name]: engine.sample(prompt) for name, engine in engines.items()}
        failures = probe.judge(answers, trainer.score)
        for name, member in members.items():
            failed[name] += member in failures
            tokens, own = zip(*answers[member], strict=True)
            gaps[name] += (torch.tensor(own) - torch.tensor(trainer.score(prompt, tokens))).flatten().tolist()
    for name, values in gaps.items():
        found = torch.tensor(values)
        wide = (found.abs() > 8 * noise_scale("bfloat16")).float().mean()
        print(f"{kind}, {name}: RMS {found.pow(2).mean().sqrt():.3f}, {wide:.4f} wide, failed {failed[name]}")
    assert failed["sound"] == 0
    # Of a model at random that hardly tells texts apart a fault may pass once, and is found by the next publish.
    assert min(failed[name] for name in FAULTS) >= num_publishes - 1, failed
