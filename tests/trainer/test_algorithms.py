"""Every algorithm in the trainer: what a step does is what its formulas do with transformers' log-probs."""

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_rl.config.algorithm_traits import TRAITS
from async_rl.config.train_section import TrainSection
from async_rl.config.trainer_section import TrainerSection
from async_rl.errors import ConfigError, RewardError
from async_rl.method.algorithms import Rollouts, Tokens
from async_rl.method.algorithms.random_groups import RandomGroup
from async_rl.method.group_proof import GroupProof
from async_rl.method.token_arrays import Logprobs
from async_rl.method.training_order import TrainingOrder
from async_rl.method.types import Batch, Group
from tests.support.algorithm_formulas import Written
from tests.support.algorithms import MAX_RESPONSE_TOKENS
from tests.support.finished_groups import Arriving
from tests.support.tiers import by_day
from tests.support.trainer.grpo_reference import sample_distributions, sample_logprobs, sampled_tokens
from tests.support.trainer.layout_comparison import deviation, run_distributed
from tests.support.trainer.layout_worker import Job, run
from tests.support.trainer.layout_worker import make_trainer as make_job_trainer
from trainer.parallel import Parallel
from trainer.trainer import MegatronTrainer

EVERYTHING: dict[str, dict[str, Any]] = {
    "grpo": {"kl_coef": 0.2, "old_policy": "model", "importance": "token_mask", "importance_high": 1.1},
    "dr_grpo": {"scale_by_std": "batch", "old_policy": "rollout", "mask_truncated": True},
    "dapo": {"overlong_tokens": 6, "mask_truncated": True, "old_policy": "model"},
    "rloo": {"kl_coef": 0.3, "kl_in": "reward", "kl_estimator": "k1", "entropy_coef": 0.05},
    "reinforce_pp_baseline": {"kl_coef": 0.1, "kl_estimator": "k2", "mode": "synchronous", "mask_truncated": True},
    "gspo": {
        "clip_low": 0.02,
        "clip_high": 0.02,
        "old_policy": "model",
        "importance": "sequence_truncate",
        "importance_high": 1.02,
        # All sequences may be clipped, which leaves no gradient but this one.
        "entropy_coef": 0.05,
    },
    "cispo": {"old_policy": "rollout", "clip_high": 0.02, "entropy_coef": 0.1},
    "sapo": {"old_policy": "model", "normalize": "token"},
    "dppo": {"old_policy": "rollout", "options": {"delta": 0.005}},
    "maxrl": {"importance": "sequence_mask", "importance_high": 1.05},
    "gdpo": {"entropy_coef": 0.05, "mode": "synchronous"},
    "pf_ppo": {"kl_coef": 0.3, "kl_in": "reward"},
    "online_dpo": {"mask_truncated": True},
    "distillation": {"teacher_coef": 0.7, "normalize": "sequence", "old_policy": "model"},
}
"""Per algorithm some of what cuts across, so that each of it is tested in the trainer."""
assert EVERYTHING.keys() == {name for name, traits in TRAITS.items() if not traits.values}, (
    "give each algorithm of TRAITS a row in EVERYTHING; one with a critic is in test_critic.py"
)

BY_DAY = ("grpo", "rloo", "gspo", "cispo", "online_dpo", "distillation")
"""Penalties in loss and reward, ratios of sequences, entropies, whole distributions and a teacher: what needs a model.
`make test` has every formula itself in async_rl/method/algorithms/test_formulas.py."""

WITH_NODES = ("rloo", "cispo", "pf_ppo")
"""Their rollouts and tokens have what nodes of a pipeline may write."""

TAUGHT = ("distillation", "sapo")
TEACHER = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4}
"""Another shape than the policy's, which every layout divides."""


@pytest.fixture(scope="session")
def teacher(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen2", seed=5, **TEACHER)


def sampled(
    groups: Sequence[Group], policy: PreTrainedModel, rng: random.Random, *, nodes: bool = False
) -> list[Group]:
    """The groups as instances with this policy would report them, not exactly; some rollouts were cut. With `nodes` the
    last group has a gradient by the rewards of its tokens only."""

    def of_tokens(num: int) -> dict[str, Logprobs]:
        return {
            "token_weights": Logprobs([rng.uniform(0, 2) for _ in range(num)]),
            "token_rewards": Logprobs([rng.gauss(0, 1) for _ in range(num)]),
        }

    def reported(group: Group) -> tuple[Any, ...]:
        return tuple(
            replace(
                r,
                logprobs=tuple(x + rng.gauss(0, 0.05) for x in sample_logprobs(policy, group, r, 1.0).tolist()),
                **(of_tokens(r.num_sampled) if nodes else {}),
            )
            for r in group.responses
        )

    def rewards(group: Group) -> tuple[float, ...]:
        return (0.5,) * len(group.rewards) if nodes and group is groups[-1] else group.rewards

    with torch.no_grad():
        return [
            replace(
                group,
                responses=reported(group),
                rewards=rewards(group),
                rollouts=tuple(
                    replace(
                        facts,
                        status="truncated" if i % 3 == 2 else "completed",
                        weight=rng.choice((0.5, 2.0)) if nodes else 1.0,
                    )
                    for i, facts in enumerate(group.rollouts)
                ),
            )
            for group in groups
        ]


def train_batch(trainer: MegatronTrainer, groups: Sequence[Group], mode: str = "periodic") -> list[GroupProof]:
    """All but the step."""
    batch = Batch(0, {group.index: group.prompt for group in groups})
    order = TrainingOrder(Arriving(list(groups)), TrainSection(iterations=1, mode=mode), [batch])
    order.begin_mini_batch()
    return [row for window in trainer.windows(order) for row in trainer.accumulate(window)]


def as_written(
    settings: dict[str, Any],
    groups: Sequence[Group],
    policy: PreTrainedModel,
    start: PreTrainedModel,
    teacher: PreTrainedModel,
) -> Written:
    """The batch with transformers' log-probs, of which the policy's have their graph."""
    with_kl = settings.get("kl_coef", 0.0) > 0 or settings["name"] == "online_dpo"
    kl = Written({"kl_estimator": "k3", **settings, "kl_coef": 0.0}, [])
    found = []
    for group in groups:
        responses, of_rollouts = [], [0.0] * len(group.rollouts)
        for rollout, response in zip(group.rollout_of, group.responses, strict=True):
            distributions = sample_distributions(policy, group, response, 1.0)
            new = distributions.gather(1, sampled_tokens(response)[:, None])[:, 0]
            with torch.no_grad():
                first, taught = (sample_logprobs(model, group, response, 1.0) for model in (start, teacher))
            reported = torch.tensor(response.logprobs, dtype=torch.float64)
            old = {"model": first, "rollout": reported}.get(settings.get("old_policy", "reuse"), new.detach())
            tokens = Tokens(
                new,
                -(distributions.exp() * distributions).sum(1),
                old,
                first if with_kl else None,
                taught if "teacher" in settings else None,
                reported,
                weights_N=of_nodes(response.token_weights),
                rewards_N=of_nodes(response.token_rewards),
            )
            responses.append((rollout, tokens))
            of_rollouts[rollout] += sum(float(kl.kl(mu, ref)) for mu, ref in zip(reported, first, strict=True))
        rewards_kl = tuple(of_rollouts) if settings.get("kl_in") == "reward" else None
        found.append(RandomGroup(Rollouts.of(group, rewards_kl), tuple(responses)))
    return Written(settings, found)


def of_nodes(numbers: Logprobs | None) -> torch.Tensor | None:
    return None if numbers is None else torch.tensor(list(numbers), dtype=torch.float64)


@pytest.mark.parametrize("micro_batch_tokens", [10_000, 20])
@pytest.mark.parametrize("name", by_day(EVERYTHING, BY_DAY))
def test_a_step_equals_the_formulas_with_the_log_probs_of_transformers(
    name: str,
    micro_batch_tokens: int,
    tiny_model: Callable[..., Path],
    teacher: Path,
    make_trainer: Callable[..., MegatronTrainer],
    rollout_groups: list[Group],
    hf_gradients: Callable[[MegatronTrainer], dict[str, torch.Tensor]],
    rng: random.Random,
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {"name": name, **EVERYTHING[name]}
    if name in TAUGHT:
        settings["teacher"] = str(teacher)
    if name == "online_dpo":
        micro_batch_tokens = 10_000
    path = tiny_model("qwen3")
    trainer = make_trainer(
        path,
        micro_batch_tokens=micro_batch_tokens,
        max_response_tokens=MAX_RESPONSE_TOKENS,
        learning_rate=1e-3,
        **settings,
    )
    mode = settings.pop("mode", "periodic")
    models = {"dtype": torch.float64}
    start = AutoModelForCausalLM.from_pretrained(path, **models)
    # One step first: the policy then differs from the reference and from the old policy.
    train_batch(trainer, sampled(rollout_groups, start, rng), mode)
    trainer.optimizer_step()
    trainer.save_hf(tmp_path / "policy")
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", **models)
    groups = sampled(rollout_groups, policy, rng, nodes=name in WITH_NODES)
    written = as_written(settings, groups, policy, start, AutoModelForCausalLM.from_pretrained(teacher, **models))
    loss = written.loss()
    loss.backward()
    expected = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    norm = float(torch.cat([gradient.flatten() for gradient in expected.values()]).norm())

    rows = train_batch(trainer, groups, mode)
    gradients = hf_gradients(trainer)
    stats = trainer.optimizer_step()
    scale = norm / float(torch.cat([gradient.flatten() for gradient in gradients.values()]).norm())
    assert norm > 0 and stats.loss == pytest.approx(float(loss.detach()), rel=1e-5, abs=1e-5)
    assert stats.grad_norm == pytest.approx(norm, rel=2e-5)
    for key, gradient in gradients.items():
        difference = (gradient.double() * scale - expected[key]).norm()
        assert difference <= 3e-5 * max(float(expected[key].norm()), 0.03 * norm), f"{key}: {difference / norm:.1e}"
    gaps = [t.old_logprobs_N - t.rollout_logprobs_N for group in written.batch for _, t in group.responses]
    weights = [written.correction(t, i) for group in written.batch for _, t in group.responses for i in range(len(t))]
    changed = [
        not math.isclose(a, b, rel_tol=1e-9) for a, b in zip(weights, expected_weights(settings, gaps), strict=True)
    ]
    assert sum(row.num_corrected for row in rows) == sum(changed)
    assert any(changed) or "importance" not in settings


def expected_weights(settings: dict[str, Any], gaps: Sequence[torch.Tensor]) -> list[float]:
    """Without limits."""
    if "importance" not in settings:
        return [1.0] * sum(map(len, gaps))
    whole = settings["importance"].startswith("sequence")
    return [math.exp(math.fsum(own) if whole else gap) for own in (gap.tolist() for gap in gaps) for gap in own]


LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3": {
        "TP2": {"tensor_parallel": 2},
        "CP2": {"context_parallel": 2},
        "PP2": {"pipeline_parallel": 2},
        "DP2": {},
    },
    "qwen3_moe": {
        "EP2 over two replicas": {"expert_parallel": 2},
        "TP2 EP2": {"tensor_parallel": 2, "expert_parallel": 2},
    },
}
"""By model."""
IN_LAYOUTS: dict[str, dict[str, Any]] = {
    "rloo": {"kl_coef": 0.3, "kl_in": "reward", "kl_estimator": "k3", "entropy_coef": 0.05},
    "reinforce_pp_baseline": {"mask_truncated": True, "kl_coef": 0.0},
    "gdpo": {"entropy_coef": 0.05, "kl_coef": 0.0},
    "dapo": {"teacher_coef": 0.5, "importance": "token_mask", "importance_high": 1.1, "old_policy": "model"},
    "online_dpo": {"kl_coef": 0.0},
}
"""What is computed across ranks: entropies, the KL of rollouts, a teacher of another shape, totals, pairs."""
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "grpo": {"entropy_coef": 0.05, "kl_coef": 0.3},
    "gspo": {"clip_low": 0.02, "clip_high": 0.02, "old_policy": "model", "entropy_coef": 0.05},
    "dapo": {"importance": "token_mask", "importance_high": 1.1, "old_policy": "model"},
    "gdpo": IN_LAYOUTS["gdpo"],
}
"""Terms besides the advantages, a ratio of responses, corrections, and totals."""


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_two_ranks_train_what_one_does(
    tiny_model: Callable[..., Path],
    teacher: Path,
    parallel: Parallel,
    rollout_groups: list[Group],
    rng: random.Random,
    tmp_path: Path,
) -> None:
    jobs, expected = [], {}
    for model, algorithms in (("qwen3", IN_LAYOUTS), ("qwen3_moe", WITH_EXPERTS)):
        path = tiny_model(model)
        # In float32, since transformers' experts do not compute in float64.
        groups = sampled(rollout_groups, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), rng)
        for name, settings in algorithms.items():
            algorithm = {"name": name, **settings} | ({"teacher": str(teacher)} if "teacher_coef" in settings else {})
            # Pairs are whole groups; all others are split, in two stages or over micro-batches.
            section = {"micro_batch_tokens": 10_000 if name == "online_dpo" else 20}
            train = {"mode": "synchronous"} if name in ("reinforce_pp_baseline", "gdpo") else {}
            one = Job(name, str(path), [groups, groups], section, algorithm, train)
            of_one = run(one, make_job_trainer(one, parallel, TrainerSection(**section)), 0, 1)
            for layout, parallels in LAYOUTS[model].items():
                jobs.append(replace(one, name=f"{layout} {name}", layout={**parallels, **section}))
                expected[jobs[-1].name] = of_one
    # Jobs of one placement share its process groups.
    jobs.sort(key=lambda job: str(job.placement))
    run_distributed(jobs, 2, tmp_path, timeout_s=300)
    for job in jobs:
        report, of = json.loads((tmp_path / f"{job.name}.json").read_text()), expected[job.name]
        for step, one in zip(report["steps"], of["steps"], strict=True):
            found = {key: deviation(step[key], one[key]) for key in ("loss", "grad_norm")}
            found |= {key: deviation(step["metrics"][key], value) for key, value in one["metrics"].items()}
            # The second step begins with weights that Adam has moved.
            assert max(found.values()) <= 5e-5, f"{job.name}: {found}"
        corrected = [sum(row["num_corrected"] for row in rows) for rows in report["rows"]]
        assert corrected == [sum(row["num_corrected"] for row in rows) for rows in of["rows"]]


def test_what_the_trainer_cannot_give_an_algorithm_is_refused(
    tiny_model: Callable[..., Path], make_trainer: Callable[..., MegatronTrainer]
) -> None:
    says = r"before the first advantage, but train\.mode is 'periodic': set it to"
    with pytest.raises(ConfigError, match=says):
        make_trainer(tiny_model("qwen3"), name="reinforce_pp_baseline")


def test_a_reward_that_an_algorithm_cannot_use_is_named(
    tiny_model: Callable[..., Path], make_trainer: Callable[..., MegatronTrainer], rollout_groups: list[Group]
) -> None:
    group = replace(rollout_groups[0], rewards=tuple(-1.0 - i for i in range(len(rollout_groups[0].rewards))))
    with pytest.raises(RewardError, match="'maxrl' divides by a group's mean reward, but a reward is -"):
        train_batch(make_trainer(tiny_model("qwen3"), name="maxrl"), [group])
    huge = replace(group, rewards=(1e9, *group.rewards[1:]))
    with pytest.raises(RewardError, match=r"'pf_ppo' weighs a rollout by \|reward\| \*\* 2, but a reward is 1e\+09"):
        train_batch(make_trainer(tiny_model("qwen3"), name="pf_ppo"), [huge])
