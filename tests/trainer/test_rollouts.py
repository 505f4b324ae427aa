"""Multi-turn rollouts with branches: what is trained is what every sequence alone, in transformers, would train."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_rl.errors import ConfigError
from async_rl.method.group_proof import GroupProof
from async_rl.method.types import Group
from tests.support.trainer.branched_groups import one_of_each_kind
from tests.support.trainer.grpo_reference import sample_logprobs
from tests.support.trainer.layout_comparison import deviation, run_distributed
from tests.support.trainer.layout_worker import Job
from tests.trainer.test_forward_backward import Policy, hf_gradients_of, load
from trainer.batching.packing import pack
from trainer.forward_backward import PackedPass, Pass, TwoStagePass, make_passes
from trainer.parallel import Parallel
from trainer.trainer import MegatronTrainer

TEMPERATURE = 0.7
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tensor_parallel": 2},
    "TP2 EP2": {"tensor_parallel": 2, "expert_parallel": 2},
    "CP2": {"context_parallel": 2},
    "PP2": {"pipeline_parallel": 2},
    "DP2": {},
    "DP2 EP2": {"expert_parallel": 2},
}
Label = tuple[int, int, int]
"""(group, response, token)."""


class WideNorm(torch.nn.Module):
    """transformers' RMSNorm without its detour through float32."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.weight, self._eps = norm.weight, norm.variance_epsilon

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self._eps)


def in_float64(path: Path) -> PreTrainedModel:
    """transformers' model, in float64 throughout."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                setattr(parent, name, WideNorm(child))
    return model


def labels_of(a_pass: Pass, number: int) -> Iterator[Label]:
    """What each label of one of its micro-batches is."""
    for part in a_pass.micro_batches[number].slices:
        for i in part.indices:
            observed = part.group.responses[i].observed
            for t in range(len(part.group.responses[i].token_ids)):
                if not any(start <= t < end for start, end in observed):
                    yield part.group.index, i, t


def weight_of(label: Label) -> float:
    """A loss that gives every token a weight of its own."""
    return float(torch.tensor(1.0 + 7 * label[0] + 0.7 * label[1] + 0.31 * label[2]).sin())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("max_tokens", [10_000, 60, 20, 6])
@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen2", False), ("olmo3", False)])
def test_log_probs_and_gradients_equal_each_sequence_alone_in_transformers(
    family: str,
    tied: bool,
    max_tokens: int,
    recompute: str,
    dtype: torch.dtype,
    tolerance: float,
    tiny_model: Callable[..., Path],
    parallel: Parallel,
    rollout_groups: list[Group],
) -> None:
    path = tiny_model(family, tied=tied)
    model, reference = load(path, dtype, recompute, parallel), in_float64(path)
    passes = make_passes(pack(rollout_groups, max_tokens), parallel, TEMPERATURE, max_tokens)
    kinds = {type(a_pass) for a_pass in passes}
    assert PackedPass in kinds and (TwoStagePass in kinds if max_tokens <= 20 else max_tokens == 60 or len(kinds) == 1)
    trained: dict[Label, float] = {}
    for a_pass in passes:

        def loss_of(number: int, logprobs_N: torch.Tensor, *_: torch.Tensor, of: Pass = a_pass) -> torch.Tensor:
            labels = list(labels_of(of, number))
            assert not trained.keys() & set(labels), "a token is trained twice"
            trained.update(zip(labels, logprobs_N.tolist(), strict=True))
            return (logprobs_N * torch.tensor([weight_of(label) for label in labels], dtype=dtype)).sum()

        a_pass.train(Policy(model), loss_of)

    loss, expected = torch.zeros((), dtype=torch.float64), {}
    for group in rollout_groups:
        for i, response in enumerate(group.responses):
            logprobs = sample_logprobs(reference, group, response, TEMPERATURE)
            observed = {t for start, end in response.observed for t in range(start, end)}
            own = [(group.index, i, t) for t in range(len(response.token_ids)) if t not in observed]
            expected.update(zip(own, logprobs.tolist(), strict=True))
            loss = loss + (logprobs * torch.tensor([weight_of(label) for label in own])).sum()
    loss.backward()
    assert trained == {label: pytest.approx(value, rel=tolerance, abs=tolerance) for label, value in expected.items()}
    expected_gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    gradients = hf_gradients_of(model)
    assert set(gradients) == set(expected_gradients)
    for name, gradient in gradients.items():
        error = float((gradient.double() - expected_gradients[name]).norm() / expected_gradients[name].norm())
        assert error <= tolerance, f"{name}: {error:.1e}"


def with_logprobs(groups: Sequence[Group], logprobs: Sequence[Sequence[tuple[float, ...]]]) -> list[Group]:
    return [
        replace(g, responses=tuple(replace(r, logprobs=own) for r, own in zip(g.responses, rows, strict=True)))
        for g, rows in zip(groups, logprobs, strict=True)
    ]


@pytest.mark.parametrize("micro_batch_tokens", [10_000, 20])
@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
@pytest.mark.parametrize("normalize", ["token", "sequence"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_batch_equals_transformers_with_baselines_and_lengths_of_whole_rollouts(
    family: str,
    normalize: str,
    kl_coef: float,
    micro_batch_tokens: int,
    tiny_model: Callable[..., Path],
    make_trainer: Callable[..., MegatronTrainer],
    rollout_groups: list[Group],
    grpo_in_transformers: Callable[..., object],
    hf_gradients: Callable[[MegatronTrainer], dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    settings = {"normalize": normalize, "kl_coef": kl_coef, "temperature": TEMPERATURE}
    start = tiny_model(family)
    trainer = make_trainer(start, micro_batch_tokens=micro_batch_tokens, **settings)
    # One step first: the policy then differs from the reference.
    trainer.accumulate(pack(rollout_groups, micro_batch_tokens))
    trainer.optimizer_step()
    trainer.save_hf(tmp_path / "policy")
    expected = grpo_in_transformers(tmp_path / "policy", start, rollout_groups, **settings)
    groups = with_logprobs(rollout_groups, expected.logprobs)
    rows = trainer.accumulate(pack(groups, micro_batch_tokens))
    gradients = hf_gradients(trainer)
    stats = trainer.optimizer_step()
    largest = max(-min(row) for rows in expected.logprobs for row in rows)
    assert max(row.all_gaps.largest for row in rows) <= 1e-5 * largest
    assert [row.all_gaps.count for row in rows] == [group.num_response_tokens for group in groups]
    assert stats.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-6)
    assert stats.metrics["entropy"] == pytest.approx(expected.entropy, rel=1e-5)
    count = sum(len(g.rewards) if normalize == "sequence" else g.num_response_tokens for g in groups)
    norm = torch.cat([g.flatten() for g in expected.gradients.values()]).norm()
    expected_gradients = expected.gradients
    assert set(gradients) == set(expected_gradients)
    for name, gradient in gradients.items():
        difference = (gradient / count - expected_gradients[name]).norm()
        # Few tokens may pass an expert: its gradient is also compared with that of the whole model.
        largest = max(float(expected_gradients[name].norm()), 0.01 * float(norm))
        assert difference <= 2e-5 * largest, f"{name}: {difference / largest:.1e}"
    assert stats.grad_norm == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        pytest.param("qwen3", ("TP2", "CP2", "PP2", "DP2"), marks=pytest.mark.nightly),
        # Its second layer, which is the second stage, has no rotary embedding.
        pytest.param("smollm3", ("TP2", "CP2", "PP2"), marks=pytest.mark.nightly),
        # Windows, and norms over the heads of both ranks.
        pytest.param("olmo3", ("TP2", "PP2"), marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", ("TP2", "DP2 EP2"), marks=pytest.mark.nightly),
        ("qwen3_moe", ("TP2 EP2", "PP2")),
    ],
)
def test_two_ranks_train_what_transformers_does(
    family: str,
    layouts: Sequence[str],
    tiny_model: Callable[..., Path],
    rollout_groups: list[Group],
    grpo_in_transformers: Callable[..., object],
    tmp_path: Path,
) -> None:
    path = tiny_model(family)
    jobs, expected = [], {}
    for normalize in ("token", "sequence"):
        expected[normalize] = grpo_in_transformers(path, path, rollout_groups, normalize=normalize, kl_coef=0.1)
        groups = with_logprobs(rollout_groups, expected[normalize].logprobs)
        for layout in layouts:
            for max_tokens in (10_000, 20):
                section = LAYOUTS[layout] | {"micro_batch_tokens": max_tokens}
                algorithm = {"normalize": normalize, "kl_coef": 0.1}
                name = f"{layout}, {max_tokens} tokens, {normalize}"
                jobs.append(Job(name, str(path), [groups], section, algorithm))
    # Jobs of one placement share its process groups.
    jobs.sort(key=lambda job: str(job.placement))
    run_distributed(jobs, 2, tmp_path, timeout_s=500)
    for job in jobs:
        of = expected[job.algorithm["normalize"]]
        report = json.loads((tmp_path / f"{job.name}.json").read_text())
        (step,), (rows,) = report["steps"], report["rows"]
        norm = torch.cat([g.flatten() for g in of.gradients.values()]).norm()
        found = {
            "loss": deviation(step["loss"], of.loss),
            "gradient norm": deviation(step["grad_norm"], float(norm)),
            "log-probs": max(row["max_logprob_gap"] for row in rows),
            "entropy": deviation(step["metrics"]["entropy"], of.entropy),
        }
        assert max(found.values()) <= 1e-5, f"{job.name}: {found}"
        assert sum(row["num_response_tokens"] for row in rows) == sum(g.num_response_tokens for g in rollout_groups)


def test_the_ledger_row_counts_rollouts_turns_and_branches_and_compares_sampled_tokens(
    tiny_model: Callable[..., Path], make_trainer: Callable[..., MegatronTrainer]
) -> None:
    trainer = make_trainer(tiny_model("qwen3"))
    group = one_of_each_kind()
    facts = (replace(group.rollouts[0], status="truncated"), group.rollouts[1])
    (row,) = trainer.accumulate([[replace(group, rollouts=facts)]])
    assert (row.num_rollouts, row.num_responses, row.num_turns, row.num_branches, row.num_truncated) == (2, 4, 5, 2, 1)
    # The group's prompt and that of a branch, once each.
    assert (row.num_prompt_tokens, row.num_response_tokens, row.all_gaps.count) == (5, 8, 8)
    assert row.versions == ("v0",)
    assert GroupProof.from_json(json.loads(json.dumps(asdict(row)))) == row


def test_the_digest_of_a_row_tells_what_was_observed_and_which_prompt_was_followed() -> None:
    group = one_of_each_kind()
    first = group.responses[0]
    changed = [
        group,
        replace(group, responses=(replace(first, token_ids=(20, 21, 30, 32, 40)), *group.responses[1:])),
        replace(group, responses=(replace(first, observed=((1, 3),)), *group.responses[1:])),
        replace(group, responses=(replace(first, prompt_ids=(9,)), *group.responses[1:])),
    ]
    assert len({GroupProof.of(one, {}).samples for one in changed}) == len(changed)


def test_a_single_turn_that_was_cut_counts_as_truncated() -> None:
    group = one_of_each_kind()
    responses = tuple(replace(r, observed=(), prompt_ids=None) for r in group.responses)
    cut = (*responses[:3], replace(responses[3], finish_reason="length"))
    row = GroupProof.of(replace(group, responses=cut, rewards=(0.0,) * 4, rollouts=()), {})
    assert (row.num_rollouts, row.num_turns, row.num_branches, row.num_truncated) == (4, 4, 0, 1)


def test_a_token_of_a_branchs_prompt_that_the_model_does_not_have_is_refused(
    tiny_model: Callable[..., Path], make_trainer: Callable[..., MegatronTrainer]
) -> None:
    group = one_of_each_kind()
    responses = (*group.responses[:2], replace(group.responses[2], prompt_ids=(12, 96)), group.responses[3])
    with pytest.raises(ConfigError, match="token id 96, but the model's vocabulary ends at 95"):
        make_trainer(tiny_model("qwen3")).accumulate([[replace(group, responses=responses)]])
