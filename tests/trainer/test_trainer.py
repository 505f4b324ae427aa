"""A whole GRPO batch on Megatron equals an independent one in transformers; sums do not depend on their order."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from async_rl.errors import ConfigError
from async_rl.method.types import Group
from async_rl.records.samples import NUM_GROUPS, NUM_ROLLOUTS
from async_rl.shared.model_limits import FAMILIES
from tests.support.tiers import by_day
from trainer.trainer import MegatronTrainer

MakeTrainer = Callable[..., MegatronTrainer]
Gradients = Callable[[MegatronTrainer], dict[str, torch.Tensor]]


def relative_error(actual: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    """Of the norm, or of `least` where that is more; an expert without a row has a gradient of 0.

    The terms of a small gradient, as a key bias has, are as large as those of others, and so are their roundings.
    """
    difference = float((actual.double() - expected.double()).norm())
    return difference / max(float(expected.double().norm()), least) if difference else 0.0


def num_labels(groups: list[Group], normalize: str) -> int:
    return sum(len(g.responses) if normalize == "sequence" else g.num_response_tokens for g in groups)


def with_logprobs(groups: list[Group], logprobs: list[list[tuple[float, ...]]]) -> list[Group]:
    return [
        replace(g, responses=tuple(replace(r, logprobs=lp) for r, lp in zip(g.responses, rows, strict=True)))
        for g, rows in zip(groups, logprobs, strict=True)
    ]


@pytest.mark.parametrize("family", by_day(FAMILIES))
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("normalize", "kl_coef", "temperature"), [("token", 0.0, 1.0), ("token", 0.2, 0.7), ("sequence", 0.2, 1.0)]
)
def test_batch_equals_transformers_and_autograd_on_unshared_samples(
    family: str,
    tied: bool,
    normalize: str,
    kl_coef: float,
    temperature: float,
    tiny_model: Callable[..., Path],
    make_trainer: MakeTrainer,
    ragged_groups: list[Group],
    grpo_in_transformers: Callable[..., object],
    hf_gradients: Gradients,
    tmp_path: Path,
) -> None:
    settings = {"normalize": normalize, "kl_coef": kl_coef, "temperature": temperature}
    start = tiny_model(family, tied=tied)
    trainer = make_trainer(start, **settings)
    # One step first: the policy then differs from the reference.
    for group in ragged_groups:
        trainer.accumulate([[group]])
    trainer.optimizer_step()
    trainer.save_hf(tmp_path / "policy")
    expected = grpo_in_transformers(tmp_path / "policy", start, ragged_groups, **settings)

    groups = with_logprobs(ragged_groups, expected.logprobs)
    proofs = [trainer.accumulate([[group]])[0] for group in groups]
    gaps = [proof.all_gaps.largest for proof in proofs]
    gradients = hf_gradients(trainer)
    stats = trainer.optimizer_step()

    largest = max(-min(row) for rows in expected.logprobs for row in rows)
    assert max(gaps) <= 1e-5 * largest
    shown = {group.index: proof.shown_logprobs for group, proof in zip(groups, proofs, strict=True)}
    for group in sorted(groups, key=lambda group: group.index)[:NUM_GROUPS]:
        for logprobs, response in zip(shown[group.index], group.responses[:NUM_ROLLOUTS], strict=True):
            assert logprobs == pytest.approx(response.logprobs, abs=1e-5 * largest)
    assert stats.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-6)
    assert set(gradients) == set(expected.gradients)
    norm = float(torch.cat([g.flatten() for g in expected.gradients.values()]).norm())
    for name, gradient in gradients.items():
        error = relative_error(gradient / num_labels(groups, normalize), expected.gradients[name], norm / 100)
        assert error <= 1e-5, f"{name}: {error:.1e}"
    assert stats.grad_norm == pytest.approx(norm, rel=1e-5)


def accumulated(trainer: MegatronTrainer, groups: list[Group], read: Gradients) -> dict[str, torch.Tensor]:
    for group in groups:
        trainer.accumulate([[group]])
    gradients = read(trainer)
    trainer.discard()
    return gradients


def test_same_order_gives_the_same_bits_and_another_order_nearly_so(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, ragged_groups: list[Group], hf_gradients: Gradients
) -> None:
    trainer, again = (make_trainer(tiny_model("qwen3", tied=True), kl_coef=0.1) for _ in range(2))
    in_order = accumulated(trainer, ragged_groups, hf_gradients)
    repeated = accumulated(again, ragged_groups, hf_gradients)
    shuffled = accumulated(trainer, random.Random(3).sample(ragged_groups, len(ragged_groups)), hf_gradients)
    for name, gradient in in_order.items():
        assert torch.equal(gradient, repeated[name]), name
        assert relative_error(shuffled[name], gradient) <= 1e-6, name


def test_discarded_groups_leave_no_trace(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, ragged_groups: list[Group]
) -> None:
    stats = []
    for discarded in ([], ragged_groups[:2]):
        trainer = make_trainer(tiny_model("qwen3"))
        for group in discarded:
            trainer.accumulate([[group]])
        trainer.discard()
        for group in ragged_groups:
            trainer.accumulate([[group]])
        stats.append(trainer.optimizer_step())
    # But for the memory of this process, whose peak the second one may raise.
    first, second = (replace(each, memory_peak_bytes=None) for each in stats)
    assert first == second


def test_ledger_row_names_versions_counts_and_the_gap(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, ragged_groups: list[Group]
) -> None:
    trainer = make_trainer(tiny_model("qwen3"))
    (row,) = trainer.accumulate([[ragged_groups[0]]])
    assert (row.index, row.prompt_id, row.versions) == (0, "p0", ("v0",))
    assert (row.num_responses, row.num_response_tokens) == (3, 15)
    assert row.all_gaps.largest > 0.1  # the made-up rollout log-probs are all -1
    assert trainer.gather([row]) == [row]


def test_metrics_are_means_over_response_tokens(
    tiny_model: Callable[..., Path],
    make_trainer: MakeTrainer,
    ragged_groups: list[Group],
    grpo_in_transformers: Callable[..., object],
) -> None:
    path = tiny_model("qwen3")
    expected = grpo_in_transformers(path, path, ragged_groups)
    trainer = make_trainer(path, kl_coef=0.1)
    for group in ragged_groups:
        trainer.accumulate([[group]])
    # At the first step the policy is the reference and the sampler.
    assert trainer.optimizer_step().metrics == {
        "clip_fraction": 0.0,
        "kl": pytest.approx(0.0, abs=1e-6),
        "entropy": pytest.approx(expected.entropy, rel=1e-5),
    }


def test_bfloat16_trains_close_to_float32(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, ragged_groups: list[Group]
) -> None:
    stats = {}
    for dtype in ("float32", "bfloat16"):
        trainer = make_trainer(tiny_model("qwen3"), dtype=dtype)
        for group in ragged_groups:
            trainer.accumulate([[group]])
        stats[dtype] = trainer.optimizer_step()
        assert {spec.dtype_name for spec in trainer.export.specs} == {dtype}
    assert stats["bfloat16"].grad_norm == pytest.approx(stats["float32"].grad_norm, rel=0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("reward", [0.7, 1000.1])
def test_equal_rewards_leave_the_weights_bit_for_bit(
    reward: float, dtype: str, tiny_model: Callable[..., Path], make_trainer: MakeTrainer, ragged_groups: list[Group]
) -> None:
    trainer = make_trainer(tiny_model("qwen3"), dtype=dtype)
    before = [tensor.clone() for _, tensor in trainer.export.stream()]
    for group in (ragged_groups[0], ragged_groups[4]):
        responses = (*group.responses, *ragged_groups[4].responses)[:7]
        trainer.accumulate([[replace(group, responses=responses, rewards=(reward,) * 7, rollouts=())]])
    assert trainer.optimizer_step().grad_norm == 0.0
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, trainer.export.stream(), strict=True))


def test_token_outside_the_vocabulary_is_refused(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, ragged_groups: list[Group]
) -> None:
    trainer = make_trainer(tiny_model("qwen3"))
    group = replace(ragged_groups[0], prompt=replace(ragged_groups[0].prompt, token_ids=(1, 96)))
    with pytest.raises(ConfigError, match="token id 96, but the model's vocabulary ends at 95"):
        trainer.accumulate([[group]])


def test_missing_model_is_refused(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a directory nor a model"):
        make_trainer(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="neither a directory nor a model"):
        make_trainer("no-such-owner/no-such-model")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        make_trainer(tmp_path)


@pytest.mark.parametrize("micro_batch_tokens", [10_000, 16])
def test_scores_are_transformers_log_probs_of_the_policy_and_leave_training_as_it_was(
    tiny_model: Callable[..., Path],
    make_trainer: MakeTrainer,
    ragged_groups: list[Group],
    grpo_in_transformers: Callable[..., object],
    hf_gradients: Gradients,
    tmp_path: Path,
    micro_batch_tokens: int,
) -> None:
    start = tiny_model("qwen3", tied=True)
    trainer = make_trainer(start, temperature=0.7, micro_batch_tokens=micro_batch_tokens)
    trainer.accumulate([[ragged_groups[0]]])
    trainer.optimizer_step()
    trainer.save_hf(tmp_path / "policy")
    trainer.accumulate([[ragged_groups[0]]])
    before = {name: gradient.clone() for name, gradient in hf_gradients(trainer).items()}
    expected = grpo_in_transformers(tmp_path / "policy", start, ragged_groups, temperature=0.7)
    for group, logprobs in zip(ragged_groups, expected.logprobs, strict=True):
        scores = trainer.score(group.prompt.token_ids, [response.token_ids for response in group.responses])
        for row, expected_row in zip(scores, logprobs, strict=True):
            assert row == pytest.approx(expected_row, abs=1e-5)
    assert all(torch.equal(gradient, before[name]) for name, gradient in hf_gradients(trainer).items())
    assert trainer.models.policy_model.training


def test_tokens_that_the_model_does_not_have_cannot_be_scored(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer
) -> None:
    with pytest.raises(ConfigError, match="token id 96, but the model's vocabulary ends at 95"):
        make_trainer(tiny_model("qwen3", tied=True)).score([1, 2], [[3, 96]])
