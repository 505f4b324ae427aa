"""Adapters that are published alone: an engine that computes otherwise with them is found and named, a sound one never.

The engine is transformers with the embedded engine's adapters, in this process; what it reports of itself stays right.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from async_rl.config.adapter_section import AdapterSection
from async_rl.config.pool_section import PublishSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.method.proof.gap_limits import noise_scale
from async_rl.rollouts.publish.canary import Canary
from async_rl.rollouts.publish.probe import Probe
from async_rl.shared.protocol.adapter import WEIGHTS_FILE
from async_rl.shared.protocol.inference import AdapterInfo
from async_rl.shared.protocol.sender import CONSTANT, SCALE
from async_rl.shared.weights.fingerprint import Fingerprint, base_digest
from async_rl.shared.weights.sender import AdapterSource, WeightSender, WeightSource
from inference_service.weight_transfer.adapters import ModelAdapters, ReceivedAdapters
from inference_service.weight_transfer.receiver import parameter_views, specs_of
from tests.support.adapter_faults import ALONE, AlonePlant
from tests.support.fresh_seed import fresh_seed
from tests.support.members import ready_member
from tests.support.trainer.random_adapters import random_adapters
from tests.trainer.policy.test_canary_weights import of_own_kind
from trainer.model.adapters import adapters_of
from trainer.policy.canary_adapters import CanaryAdapters
from trainer.trainer import MegatronTrainer

MakeTrainer = Callable[..., MegatronTrainer]
PROMPT = [5, 17, 60, 8, 33, 71]
NUM_TOKENS = 64


@pytest.fixture(autouse=True)
def seeded() -> None:
    fresh_seed()


def info_of(trainer: MegatronTrainer, adapter: AdapterSection) -> AdapterInfo:
    return AdapterInfo(rank=adapter.rank or 0, alpha=adapter.alpha, base=base_digest(trainer.export.stream()))


def sender_of(trainer: MegatronTrainer, info: AdapterInfo) -> WeightSender:
    export, weights, alone = trainer.export, trainer.canary_weights, trainer.adapter_export
    assert alone is not None
    adapter = AdapterSource(alone.specs, alone.stream, info)
    source = WeightSource(
        export.specs, export.stream, trainer.score, weights.change, weights.classes, weights.one_tensor, adapter=adapter
    )
    return WeightSender(source, PublishSection(), "run")


class Engine:
    """Takes published adapters beside a transformers model; `fault` is a name of `ALONE`."""

    def __init__(self, checkpoint: Path, info: AdapterInfo, dtype: torch.dtype, fault: str | None = None) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()
        self.adapters, self._info = ModelAdapters(self.model), info
        if fault is not None:
            AlonePlant(fault).in_(self.adapters)

    def load(self, stream: Iterable[tuple[Any, torch.Tensor]]) -> None:
        factors = {spec.name: tensor.clone() for spec, tensor in stream}
        self.adapters.put(ReceivedAdapters(self._info, factors, Fingerprint))

    @torch.no_grad()
    def sample(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        tokens = torch.randint(self.model.config.vocab_size, (NUM_TOKENS,))
        logits = self.model(torch.cat([torch.tensor(PROMPT), tokens])[None]).logits[0, len(PROMPT) - 1 : -1].float()
        logprobs = logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
        return tuple(tokens.tolist()), tuple(logprobs.tolist())


def canary_of(dtype: str) -> Canary:
    return Canary(PublishSection(), RolloutSection(), PROMPT, noise_scale(dtype), dtype)


def judged(trainer: MegatronTrainer, info: AdapterInfo, engines: Mapping[Any, Engine], dtype: str) -> dict[Any, str]:
    """The canary's reasons by member."""
    sender, canary = sender_of(trainer, info), canary_of(dtype)
    canary.kinds |= {member: member.url for member in engines}

    def sample(members: Sequence[Any]) -> dict[Any, Any]:
        for member in members:
            engines[member].load(trainer.adapter_export.stream())  # type: ignore[union-attr]
        return {member: [engines[member].sample()] for member in members}

    with canary.changed(sender):
        failures = canary.judge(sample(list(engines)), sender, sample)
    return {member: str(error) for member, error in failures.items()}


def factors_of(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    assert trainer.adapter_export is not None
    return {spec.name: tensor.clone() for spec, tensor in trainer.adapter_export.stream()}


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_what_is_published_are_the_factors_and_the_base_below_them(
    family: str, tiny_model: Callable[..., Path], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    base = tiny_model(family)
    adapter = random_adapters(base, tmp_path / "adapters")
    trainer = make_trainer(base, adapter=adapter, publishes_adapters=True)
    stream = factors_of(trainer)
    assert same(stream, load_file(tmp_path / "adapters" / WEIGHTS_FILE))
    assert [spec.name for spec in trainer.adapter_export.specs] == list(stream)  # type: ignore[union-attr]
    model = AutoModelForCausalLM.from_pretrained(base)
    views = parameter_views(model)
    digest = base_digest((specs_of(views)[name], views[name]) for name in sorted(views, reverse=True))
    assert info_of(trainer, adapter).base == digest
    with torch.no_grad():
        next(iter(views.values())).view(-1)[0] += 1e-3
    assert base_digest((specs_of(views)[name], view) for name, view in views.items()) != digest


NAMES = {
    "the base": "computes with none:",
    "an older adapter": "computes with an older version of all:",
    "another scale": "computes with all multiplied by 1.3",
    "a layer left out": "computes with all but those of model.layers.0:",
    "a matrix left out": "computes with all but those of model.layers.1.mlp.up_proj:",
    "permuted ranks": "computes with their ranks in another order:",
    "A and B of two versions": "computes with an older version of lora_A:",
    "a transposed B": "computes with their values in another order:",
    "a zeroed B": "computes with none:",
    # As random as the canary's own: neither a kind of layer nor an order explains them.
    "another run's": "does not clearly compute with the weights it was sent:",
    "merged and beside": "computes with all multiplied by 2:",
    "alpha for alpha / rank": "computes with all multiplied by {}:",
}
"""What is said of each planted fault; of one that is no other by its log-probs, the same."""


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("starts", ["trained", pytest.param("new", marks=pytest.mark.nightly)])
def test_each_fault_with_adapters_is_found_by_the_canary_and_a_sound_engine_passes(
    dtype: str, starts: str, tiny_model: Callable[..., Path], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    base = tiny_model("qwen3")
    adapter = AdapterSection(rank=4, alpha=8)
    if starts == "trained":
        adapter = random_adapters(base, tmp_path / "adapters")
    trainer = make_trainer(base, dtype=dtype, adapter=adapter, publishes_adapters=True)
    info, before = info_of(trainer, adapter), factors_of(trainer)
    engines = {of_own_kind(fault): Engine(base, info, getattr(torch, dtype), fault) for fault in (None, *ALONE)}
    failures, misnamed = judged(trainer, info, engines, dtype), {}
    for member, fault in zip(engines, (None, *ALONE), strict=True):
        print(f"{fault}: {failures.get(member)}")
    for member, fault in zip(engines, (None, *ALONE), strict=True):
        assert (member in failures) == (fault is not None), (fault, failures.get(member))
        if fault is not None and NAMES[fault].format(adapter.rank) not in failures[member]:
            misnamed[fault] = failures[member]
    # Rounding in bfloat16 is near to what one matrix or a similar scale changes: found, but by another name.
    assert not misnamed or dtype == "bfloat16", misnamed
    assert same(before, factors_of(trainer)), "the true ones are there again"


NUM_PUBLISHES, CANARY_EVERY = 100, 10


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hundred_sound_publishes_raise_no_alarm(
    dtype: str, tiny_model: Callable[..., Path], make_trainer: MakeTrainer
) -> None:
    """Each of adapters that are random anew: by fingerprint and probe, and every tenth by a canary."""
    base, adapter = tiny_model("qwen3"), AdapterSection(rank=4, alpha=8)
    trainer = make_trainer(base, dtype=dtype, adapter=adapter, publishes_adapters=True)
    info = info_of(trainer, adapter)
    engine = Engine(base, info, getattr(torch, dtype))
    sound = ready_member("sound")
    probe = Probe(PublishSection(), RolloutSection(), PROMPT, noise_scale(dtype))
    for number in range(NUM_PUBLISHES):
        with torch.no_grad():
            for each in adapters_of(trainer.models.policy_model).values():
                for factor in each.parameters():
                    factor.copy_(0.2 * torch.randn_like(factor))
        if number % CANARY_EVERY == 0:
            assert judged(trainer, info, {of_own_kind(number): engine}, dtype) == {}
        engine.load(trainer.adapter_export.stream())  # type: ignore[union-attr]
        received = ReceivedAdapters(info, factors_of(trainer), Fingerprint)
        assert engine.adapters.fingerprint() == received.fingerprint()
        assert probe.judge({sound: [engine.sample()]}, trainer.score) == {}


def test_faults_and_classes_are_those_of_the_layers_that_are_targeted(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer
) -> None:
    adapter = AdapterSection(rank=3, targets=("v_proj", "down_proj"))
    trainer = make_trainer(tiny_model("qwen3"), adapter=adapter, publishes_adapters=True)
    weights = trainer.canary_weights
    assert isinstance(weights, CanaryAdapters)
    assert weights.classes == ("v_proj lora_A", "v_proj lora_B", "down_proj lora_A", "down_proj lora_B")
    before, scored = factors_of(trainer), trainer.score(PROMPT, [[3, 4]])
    weights.change(dict.fromkeys(weights.classes, 2))
    changed = trainer.score(PROMPT, [[3, 4]])
    weights.change(dict.fromkeys(weights.classes, 2) | {SCALE: 200})
    doubled = trainer.score(PROMPT, [[3, 4]])
    weights.change(dict.fromkeys(weights.classes, CONSTANT))
    assert trainer.score(PROMPT, [[3, 4]]) == scored, "new adapters add nothing"
    assert len({str(each) for each in (scored, changed, doubled)}) == 3
    weights.restore()
    assert not weights.are_changed and same(before, factors_of(trainer))
    assert trainer.score(PROMPT, [[3, 4]]) == scored
