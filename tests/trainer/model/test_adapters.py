"""Adapters equal peft's: log-probs, gradients, steps, and the weights that they are merged into."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from async_rl.config.adapter_section import AdapterSection
from async_rl.config.file import parse_config
from async_rl.errors import ConfigError, UpdatesRoundedAway
from async_rl.method.types import Group
from async_rl.shared.model_families import TABLE
from async_rl.shared.protocol.adapter import PREFIX, WEIGHTS_FILE
from tests.support.minimal_config import minimal_tree
from tests.support.tiers import by_day
from tests.support.trainer.random_adapters import ALL, ALPHA, ATTENTION, RANK, random_adapters
from tests.trainer.test_trainer import num_labels, relative_error, with_logprobs
from trainer.devices import cpu_ops
from trainer.forward_backward import make_passes
from trainer.hf.adapters import save_adapters
from trainer.model.adapters import adapters_of, base_parameters
from trainer.parallel import Parallel
from trainer.policy import merge_watch, optimizer
from trainer.policy.frozen_adapters import FrozenAdapters
from trainer.trainer import MegatronTrainer

MakeTrainer = Callable[..., MegatronTrainer]
SOME = ("q_proj", "v_proj", "o_proj")
FAMILIES = [family for family, traits in TABLE.items() if not traits.has_latents and not traits.delta]


def gradients_of(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    """The sums of the gradients of all factors, by peft's names of these."""
    found = {}
    for adapter in adapters_of(trainer.models.policy_model).values():
        for factor in adapter.parameters():
            found[f"{PREFIX}{adapter.whole[id(factor)][0]}.default.weight"] = factor.main_grad.clone()  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("family", by_day(FAMILIES))
@pytest.mark.parametrize(
    ("targets", "recompute"), [(ALL, "none"), (ALL, "full"), (SOME, "selective"), (("down_proj",), "selective")]
)
def test_a_batch_equals_peft(
    family: str,
    targets: tuple[str, ...],
    recompute: str,
    tiny_model: Callable[..., Path],
    make_trainer: MakeTrainer,
    ragged_groups: list[Group],
    grpo_in_transformers: Callable[..., Any],
    tmp_path: Path,
) -> None:
    if TABLE[family].experts and targets != SOME:
        targets = ATTENTION
    base = tiny_model(family)
    adapter = random_adapters(base, tmp_path / "adapters", targets)
    trainer = make_trainer(base, kl_coef=0.2, recompute=recompute, adapter=adapter)
    expected = grpo_in_transformers(base, base, ragged_groups, kl_coef=0.2, adapter=adapter.path)
    groups = with_logprobs(ragged_groups, expected.logprobs)
    proofs = [trainer.accumulate([[group]])[0] for group in groups]
    largest = max(-min(row) for rows in expected.logprobs for row in rows)
    assert max(proof.all_gaps.largest for proof in proofs) <= 1e-5 * largest
    gradients = gradients_of(trainer)
    stats = trainer.optimizer_step()
    assert stats.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-6)
    assert set(gradients) == set(expected.gradients)
    norm = float(torch.cat([g.flatten() for g in expected.gradients.values()]).norm())
    for name, gradient in gradients.items():
        error = relative_error(gradient / num_labels(groups, "token"), expected.gradients[name], norm / 100)
        assert error <= 1e-5, f"{name}: {error:.1e}"
    assert stats.grad_norm == pytest.approx(norm, rel=1e-5)


NEW = AdapterSection(rank=RANK, alpha=ALPHA)


def logprobs(trainer: MegatronTrainer, groups: list[Group], frozen: Any = None) -> torch.Tensor:
    """Of all responses, under the policy or a frozen model of its trainer."""
    (a_pass,) = make_passes([groups], trainer._parallel, 1.0, 10_000)
    with frozen.resident() if frozen else trainer.models.policy_to_score() as model:
        return torch.cat(a_pass.logprobs(model))


def weights(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    return {spec.name: tensor.clone() for spec, tensor in trainer.export.stream()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_new_adapters_and_none_are_the_base_bit_for_bit(
    dtype: str, tiny_model: Callable[..., Path], make_trainer: MakeTrainer, ragged_groups: list[Group], tmp_path: Path
) -> None:
    base = tiny_model("qwen3", tied=True)
    full, new = (make_trainer(base, dtype=dtype, adapter=adapter) for adapter in (None, NEW))
    expected = logprobs(full, ragged_groups)
    assert torch.equal(logprobs(new, ragged_groups), expected)
    assert all(torch.equal(tensor, weights(full)[name]) for name, tensor in weights(new).items())
    changed = make_trainer(base, dtype=dtype, kl_coef=0.1, adapter=random_adapters(base, tmp_path / "adapters"))
    reference = changed.models.reference
    assert isinstance(reference, FrozenAdapters) and not list(reference.parameters())
    assert torch.equal(logprobs(changed, ragged_groups, reference), expected)
    assert not torch.equal(logprobs(changed, ragged_groups), expected), "and they are there again"


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama"])
def test_what_is_published_is_what_peft_merges_and_what_is_saved_is_what_was_loaded(
    family: str, tiny_model: Callable[..., Path], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    base = tiny_model(family)
    adapter = random_adapters(base, tmp_path / "adapters", SOME)
    trainer = make_trainer(base, adapter=adapter)
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter.path).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    expected = load_file(tmp_path / "merged/model.safetensors")
    assert set(weights(trainer)) == set(expected)
    for name, tensor in weights(trainer).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)
    save_adapters(trainer.models.policy_model, adapter, str(base), tmp_path / "saved")
    saved, loaded = (load_file(path / WEIGHTS_FILE) for path in (tmp_path / "saved", adapter.path or tmp_path))
    assert saved.keys() == loaded.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved)
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "saved")


def test_steps_are_those_of_adamw_on_the_factors(
    tiny_model: Callable[..., Path],
    make_trainer: MakeTrainer,
    ragged_groups: list[Group],
    grpo_in_transformers: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Adam divides a gradient by its own size: without a larger eps, rounding decides the steps of tiny gradients.
    monkeypatch.setattr(optimizer, "EPS", 1e-2)
    base = tiny_model("qwen3")
    adapter = random_adapters(base, tmp_path / "adapters")
    assert adapter.path is not None
    file = adapter.path / WEIGHTS_FILE
    trainer = make_trainer(base, adapter=adapter, weight_decay=0.1, clip_grad_norm=1e9, schedule="constant")
    factors = {name: tensor.double().requires_grad_() for name, tensor in load_file(file).items()}
    steps = torch.optim.AdamW(factors.values(), lr=1e-2, betas=(0.9, 0.999), eps=1e-2, weight_decay=0.1)
    for _ in range(2):
        expected = grpo_in_transformers(base, base, ragged_groups, adapter=adapter.path)
        for group in with_logprobs(ragged_groups, expected.logprobs):
            trainer.accumulate([[group]])
        for group in steps.param_groups:
            group["lr"] = trainer.optimizer.learning_rate
            group["betas"] = (0.9, trainer.optimizer._section.beta2)
        trainer.optimizer_step()
        for name, factor in factors.items():
            factor.grad = expected.gradients[name.replace(".weight", ".default.weight")]
        steps.step()
        save_file({name: factor.detach() for name, factor in factors.items()}, file)
    save_adapters(trainer.models.policy_model, adapter, str(base), tmp_path / "saved")
    for name, tensor in load_file(tmp_path / "saved" / WEIGHTS_FILE).items():
        torch.testing.assert_close(tensor.double(), factors[name].detach(), rtol=1e-5, atol=1e-6)


def test_gradients_sums_and_moments_are_those_of_adapters_and_no_frozen_weight_has_a_product(
    tiny_model: Callable[..., Path],
    make_trainer: MakeTrainer,
    ragged_groups: list[Group],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = make_trainer(tiny_model("qwen3"), adapter=NEW)
    model = trainer.models.policy_model
    frozen = {tuple(p.shape) for name, p in base_parameters(model).items() if p.dim() == 2}
    products: list[tuple[int, ...]] = []

    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        products.append((a.shape[-2], b.shape[-1]))
        return a @ b

    monkeypatch.setattr(cpu_ops.products, "matmul", matmul)
    for group in ragged_groups:
        trainer.accumulate([[group]])
    assert products and not frozen.intersection(products)
    num_factors = sum(p.numel() for adapter in adapters_of(model).values() for p in adapter.parameters())
    policy = trainer.models.policy
    num_summed = sum(p.numel() for buffer in policy.buffers for p in buffer.params)
    states = list(trainer.optimizer.parameter_states())
    assert num_summed == num_factors == sum(state.master.numel() for state in states)
    size = trainer.training_pool.model
    assert size is not None and size.num_adapter_parameters == num_factors
    assert {state.master.dtype for state in states} == {torch.float32}


def test_old_policies_keep_their_adapters(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, ragged_groups: list[Group], tmp_path: Path
) -> None:
    base = tiny_model("qwen3")
    adapter = random_adapters(base, tmp_path / "adapters")
    trainer = make_trainer(base, old_policy="lagged", adapter=adapter)
    before = logprobs(trainer, ragged_groups)
    for group in ragged_groups:
        trainer.accumulate([[group]])
    trainer.optimizer_step()
    after = logprobs(trainer, ragged_groups)
    assert torch.equal(logprobs(trainer, ragged_groups, trainer.models.old), before)
    assert not torch.equal(after, before) and torch.equal(logprobs(trainer, ragged_groups), after)


def test_the_canary_changes_and_restores_what_is_published(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    base = tiny_model("qwen3", tied=True)
    trainer = make_trainer(base, adapter=random_adapters(base, tmp_path / "adapters"))
    true = weights(trainer)
    trainer.canary_weights.change(dict.fromkeys(trainer.canary_weights.classes, 2))
    changed = weights(trainer)
    trainer.canary_weights.restore()
    assert all(torch.equal(tensor, true[name]) for name, tensor in weights(trainer).items())
    assert not any(torch.equal(tensor, true[name]) for name, tensor in changed.items() if tensor.dim() == 2)


def test_in_bfloat16_the_gap_to_float64_is_the_bases_own(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, ragged_groups: list[Group], tmp_path: Path
) -> None:
    base = tiny_model("qwen3", num_hidden_layers=4)
    adapter = random_adapters(base, tmp_path / "adapters")
    gaps = []
    for given in (None, adapter):
        narrow, wide = (make_trainer(base, dtype=dtype, adapter=given) for dtype in ("bfloat16", "float32"))
        gaps.append(float((logprobs(narrow, ragged_groups) - logprobs(wide, ragged_groups)).abs().mean()))
    assert gaps[1] < 3 * gaps[0], gaps


def test_what_rounding_leaves_is_counted_and_an_update_that_is_lost_ends_the_run(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, ragged_groups: list[Group]
) -> None:
    trainer = make_trainer(tiny_model("qwen3"), dtype="bfloat16", adapter=NEW, learning_rate=1e-12)
    factors = [b for adapter in adapters_of(trainer.models.policy_model).values() for b in adapter.b.values()]

    def step(published: int) -> dict[str, float]:
        for _ in range(published):
            weights(trainer)
            trainer.before_publish()
        trainer.accumulate([[ragged_groups[0]]])
        return trainer.optimizer_step().metrics

    assert "merged_share" not in step(0) and step(1)["merged_share"] == 0.0
    for factor in factors:
        factor.data.fill_(0.5)
    assert step(2)["merged_share"] > 0.9
    for factor in factors:
        factor.data.fill_(1e-9)
    for _ in range(merge_watch.MAX_UNCHANGED - 1):
        assert step(1)["merged_share"] == 0.0
    with pytest.raises(UpdatesRoundedAway, match=r"the adapter of stage 0, decoder\.layers.* has an update"):
        step(1)


def test_a_saved_model_that_has_lost_what_its_adapters_learned_is_said_so(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = tiny_model("qwen3")
    trainer = make_trainer(base, dtype="bfloat16", adapter=NEW)
    trainer.save_hf(tmp_path / "new")
    adapters = adapters_of(trainer.models.policy_model).values()
    for size in (0.5, 1e-9):
        for adapter in adapters:
            for factor in adapter.b.values():
                factor.data.fill_(size)
        assert not caplog.records
        trainer.save_hf(tmp_path / str(size))
    said = f"of {len(adapters)} matrices whose adapters have an update {len(adapters)} are those of the base"
    assert said in caplog.text
    assert all(
        map(
            torch.equal,
            load_file(tmp_path / "1e-09" / "model.safetensors").values(),
            load_file(tmp_path / "new" / "model.safetensors").values(),
        )
    )


def test_what_is_merged_is_rounded_once_however_many_publishes_there_were(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer
) -> None:
    base = tiny_model("qwen3")
    trainer = make_trainer(base, dtype="bfloat16", adapter=NEW)
    adapters = adapters_of(trainer.models.policy_model).values()
    name = "model.layers.1.self_attn.o_proj"
    for _ in range(20):
        with torch.no_grad():
            for factor in (each for adapter in adapters for each in adapter.parameters()):
                factor.copy_(0.1 * torch.randn_like(factor))
        published = weights(trainer)[f"{name}.weight"]
    (adapter,) = (each for each in adapters if any(factor[0] == f"{name}.lora_A" for factor in each.whole.values()))
    own = load_file(base / "model.safetensors")[f"{name}.weight"].bfloat16().float()
    exact = own + adapter.scale * adapter.b["o_proj"].detach() @ adapter.a["o_proj"].detach()
    # Half a unit in the last of bfloat16's eight bits.
    assert bool(((published.float() - exact).abs() <= exact.abs() * 2**-8 * 1.001).all())
    assert not torch.equal(published.float(), own)


def test_adapters_to_start_from_are_not_read_where_a_checkpoint_has_the_runs_own(
    tiny_model: Callable[..., Path], parallel: Parallel, tmp_path: Path
) -> None:
    base = tiny_model("qwen3")
    first = random_adapters(base, tmp_path / "adapters", SOME)
    tree = {**minimal_tree(), "model": {"path": str(base)}, "adapter": first.model_dump(mode="json")}
    config = parse_config({**tree, "run": {"dir": str(tmp_path / "run"), "resume": True}}, "here")

    def have_begun() -> bool:
        adapters = adapters_of(MegatronTrainer.of(config, parallel).models.policy_model)
        return any(bool(b.any()) for adapter in adapters.values() for b in adapter.b.values())

    assert have_begun()
    (tmp_path / "adapters").rename(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"adapter\.path: '.*adapter_model\.safetensors' cannot be read"):
        MegatronTrainer.of(config, parallel)
    (tmp_path / "run/checkpoints/iteration-000002").mkdir(parents=True)
    assert not have_begun(), "they are zero until the checkpoint is loaded"


def test_a_step_with_adapters_has_two_thirds_of_the_products_of_one_of_all_weights(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, ragged_groups: list[Group]
) -> None:
    """Per weight and row 2 floating-point operations forward, 2 for the input's gradient, and 2 for a weight's own."""
    # Attention's own products, of which both have all, are hardly any beside these matrices.
    base = tiny_model("qwen3", hidden_size=256, intermediate_size=1024)
    # One with equal rewards would run forward only, which is the same in both.
    group = replace(ragged_groups[0], rewards=(1.0, 0.0, 0.0))

    def operations(adapter: AdapterSection | None) -> int:
        trainer = make_trainer(base, adapter=adapter)
        with FlopCounterMode(display=False) as counter:
            trainer.accumulate([[group]])
        return int(counter.get_total_flops())

    share = operations(AdapterSection(rank=1)) / operations(None)
    print(f"share of the operations: {share:.3f}")
    # A rank of 1 adds 6 (inputs + outputs) to 6 inputs x outputs: less than a hundredth here. With the gradients of the
    # layers' up_proj alone the share is above 0.75.
    assert 0.6 < share < 0.75
