"""PPO with a critic: losses and gradients of both models, and that nothing of them depends on the layout."""

import functools
import json
import math
import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from async_rl.config.sections import Config
from async_rl.config.trainer_section import TrainerSection
from async_rl.errors import ConfigError, NonFiniteGradient
from async_rl.method.types import Group
from tests.support import ROOT
from tests.support.trainer.branched_groups import branched_groups
from tests.support.trainer.checkpoint_worker import Run, run_config
from tests.support.trainer.layout_comparison import deviation, run_distributed
from tests.support.trainer.layout_worker import Job, run
from tests.support.trainer.layout_worker import make_trainer as make_job_trainer
from tests.support.trainer.ppo_reference import ExpectedPPO, make_reward_model, ppo_in_transformers
from tests.trainer.checkpoint.test_checkpoint import assert_same, start, whole_tensors
from tests.trainer.conftest import by_checkpoint_name
from trainer.batching.packing import pack
from trainer.checkpoint.compatibility import require_same_run
from trainer.devices import choose_device
from trainer.forward_backward import PackedPass
from trainer.hf.weight_map import weight_map
from trainer.model.gpt import SharedPromptGPT
from trainer.parallel import Parallel
from trainer.trainer import MegatronTrainer

MakeTrainer = Callable[..., MegatronTrainer]
GAE = {"gamma": 0.97, "gae_lambda": 0.8}
T = TypeVar("T")
PPO = {"name": "ppo", "kl_coef": 0.05, "kl_in": "reward", "kl_estimator": "k2"}
FAMILIES_AND_LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3": {
        "TP2": {"tensor_parallel": 2},
        "CP2": {"context_parallel": 2},
        "PP2": {"pipeline_parallel": 2},
        "DP2": {},
    },
    "qwen3_moe": {"EP2": {"expert_parallel": 2}},
}


@pytest.fixture(scope="module")
def reward_model(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A checkpoint with other weights than the policy's, and a head; one for each family and options."""

    @functools.cache
    def make(family: str, **options: Any) -> Path:
        return make_reward_model(tiny_model(family, seed=7, **options), tmp_path_factory.mktemp("reward_model"))

    return make


def sums_of(model: SharedPromptGPT) -> dict[str, torch.Tensor]:
    """The gradients in a model's buffers, under Hugging Face names."""
    gradients = {name: parameter.main_grad for name, parameter in model.named_parameters()}
    return {
        name: part.clone()
        for entry in weight_map(model.shape)
        for name, part in zip(entry.hf_shapes, entry.fusion.split(entry.of(gradients)), strict=True)
    }


def save_critic(trainer: MegatronTrainer, like: Path, path: Path) -> None:
    """Saves the critic as a reward model; `like` is one of the same shape."""
    assert trainer.critic is not None
    model = trainer.critic.value_model
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    theirs = AutoModelForSequenceClassification.from_pretrained(like, dtype=torch.float32)
    for entry in weight_map(model.shape):
        for name, part in zip(entry.hf_shapes, entry.fusion.split(entry.of(parameters)), strict=True):
            theirs.get_parameter(name).data.copy_(part)
    theirs.save_pretrained(path)


def assert_gradients(sums: dict[str, torch.Tensor], count: int, expected: dict[str, torch.Tensor]) -> None:
    of_each, whole = dict(by_checkpoint_name(expected)), norm_of(expected)
    assert set(sums) == set(of_each)
    for name, gradient in sums.items():
        difference = float((gradient.double() / count - of_each[name]).norm())
        # Few tokens may pass an expert: its gradient is also compared with that of the whole model.
        largest = max(float(of_each[name].norm()), 0.01 * whole)
        assert difference <= 1e-5 * largest, f"{name}: {difference / largest:.1e}"


def norm_of(gradients: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([gradient.flatten() for gradient in gradients.values()]).norm())


def expected_metrics(expected: ExpectedPPO) -> dict[str, float]:
    return {
        "value_loss": expected.value_loss,
        "value": float(expected.values.mean()),
        "explained_variance": expected.explained_variance,
        "critic_grad_norm": norm_of(expected.critic),
    }


@pytest.mark.parametrize("micro_batch_tokens", [10_000, 20])
@pytest.mark.parametrize(
    ("family", "tied"), [("qwen3", True), ("qwen2", False), ("llama", False), ("qwen3_moe", False)]
)
def test_losses_and_gradients_of_both_equal_each_sequence_alone_in_transformers(
    family: str,
    tied: bool,
    micro_batch_tokens: int,
    tiny_model: Callable[..., Path],
    reward_model: Callable[..., Path],
    make_trainer: MakeTrainer,
    rollout_groups: list[Group],
    tmp_path: Path,
) -> None:
    """Rollouts of several turns with branches; packed, and in two stages."""
    start, head = tiny_model(family, tied=tied), reward_model(family, tied=tied)
    critic = {**GAE, "critic_path": str(head)}
    trainer = make_trainer(start, **PPO, options=critic, temperature=0.7, micro_batch_tokens=micro_batch_tokens)
    trainer.save_hf(tmp_path / "policy")
    settings = {**GAE, "temperature": 0.7, "kl_coef": PPO["kl_coef"]}
    expected = ppo_in_transformers(tmp_path / "policy", start, head, rollout_groups, **settings)

    for window in pack(rollout_groups, micro_batch_tokens):
        trainer.accumulate([window])
    assert trainer.critic is not None
    num_tokens = sum(group.num_response_tokens for group in rollout_groups)
    assert_gradients(sums_of(trainer.models.policy_model), num_tokens, expected.policy)
    assert_gradients(sums_of(trainer.critic.value_model), num_tokens, expected.critic)
    stats = trainer.optimizer_step()
    assert stats.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-6)
    assert stats.grad_norm == pytest.approx(norm_of(expected.policy), rel=1e-5)
    assert stats.num_untrained == 0
    for name, value in expected_metrics(expected).items():
        assert stats.metrics[name] == pytest.approx(value, rel=2e-5, abs=1e-5, nan_ok=True), name


@pytest.mark.nightly
@pytest.mark.parametrize(("frozen_weights", "micro_batch_tokens"), [("device", 10_000), ("host", 20)])
def test_a_second_step_of_a_batch_has_the_values_and_log_probs_of_its_start_as_old_ones(
    frozen_weights: str,
    micro_batch_tokens: int,
    tiny_model: Callable[..., Path],
    reward_model: Callable[..., Path],
    make_trainer: MakeTrainer,
    tmp_path: Path,
) -> None:
    """Both clips bind: they are far below what a step changes. The groups are always the same: of one draw in ten all
    values of the last step move away from the returns, where the larger loss is the one without a clip."""
    rollout_groups = branched_groups(random.Random(1))
    start, head = tiny_model("qwen3", tied=True), reward_model("qwen3", tied=True)
    clips = {"value_clip": 0.001}
    trainer = make_trainer(
        start,
        **PPO,
        options={**GAE, **clips, "critic_path": str(head), "critic_learning_rate": 1e-3},
        learning_rate=1e-3,
        clip_low=0.0005,
        clip_high=0.0005,
        old_policy="model",
        steps_per_batch=2,
        frozen_weights=frozen_weights,
        micro_batch_tokens=micro_batch_tokens,
    )
    assert trainer.critic is not None and trainer.critic.old is not None

    def expect(groups: list[Group], **old: Path) -> ExpectedPPO:
        return ppo_in_transformers(
            tmp_path / "policy", start, tmp_path / "critic", groups, **GAE, **clips, **old, kl_coef=0.05, clip=0.0005
        )

    for _ in range(2):  # Two batches, of which the second begins with other weights.
        trainer.before_publish()
        for name in ("old_policy", "policy"):
            trainer.save_hf(tmp_path / name)
        for name in ("old_critic", "critic"):
            save_critic(trainer, head, tmp_path / name)
        old = {"old_path": tmp_path / "old_policy", "old_critic_path": tmp_path / "old_critic"}
        for groups in (rollout_groups[::2], rollout_groups[1::2]):
            expected = expect(groups, **old)
            for window in pack(groups, micro_batch_tokens):
                trainer.accumulate([window])
            num_tokens = sum(group.num_response_tokens for group in groups)
            assert_gradients(sums_of(trainer.models.policy_model), num_tokens, expected.policy)
            assert_gradients(sums_of(trainer.critic.value_model), num_tokens, expected.critic)
            metrics = trainer.optimizer_step().metrics
            for name, value in expected_metrics(expected).items():
                assert metrics[name] == pytest.approx(value, rel=2e-5, abs=1e-5, nan_ok=True), name
            trainer.save_hf(tmp_path / "policy")
            save_critic(trainer, head, tmp_path / "critic")
        # The clips matter: without them the last gradients would be others.
        free = ppo_in_transformers(
            tmp_path / "policy", start, tmp_path / "critic", groups, **GAE, **old, kl_coef=0.05, clip=9, value_clip=9
        )
        bound = expect(groups, **old)
        for with_clip, without in ((bound.policy, free.policy), (bound.critic, free.critic)):
            differences = {name: gradient - without[name] for name, gradient in with_clip.items()}
            assert norm_of(differences) > 1e-3 * norm_of(with_clip)


def test_the_critic_learns_alone_in_its_first_iterations(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, ragged_groups: list[Group]
) -> None:
    """And the policy's schedule begins after them."""
    trainer = make_trainer(tiny_model("qwen3"), name="ppo", options={"critic_iterations_alone": 2}, weight_decay=0.1)
    assert trainer.critic is not None
    models = (trainer.models.policy, trainer.critic.model)

    def weights() -> list[torch.Tensor]:
        return [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models]

    moved, rates, before = [], [], weights()
    for _ in range(3):
        trainer.accumulate([ragged_groups])
        rates.append(trainer.optimizer_step().learning_rate)
        after = weights()
        moved.append([not torch.equal(a, b) for a, b in zip(before, after, strict=True)])
        before = after
    assert moved == [[False, True], [False, True], [True, True]]
    assert rates == [0.0, 0.0, 1e-2]


def test_a_critic_begins_as_the_policy_with_a_head_of_zeros(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, ragged_groups: list[Group]
) -> None:
    """So the first step is REINFORCE without a baseline, under every layout and seed."""
    trainer = make_trainer(tiny_model("qwen3", tied=True), name="ppo")
    assert trainer.critic is not None
    own, of_policy = trainer.critic.value_model.state_dict(), trainer.models.policy_model.state_dict()
    head = own.pop("output_layer.weight")
    assert head.shape == (1, 32) and not head.any()
    assert all(torch.equal(own[name], tensor) for name, tensor in of_policy.items() if tensor is not None)
    trainer.accumulate([ragged_groups])
    metrics = trainer.optimizer_step().metrics
    rewards = [r for g in ragged_groups for r, n in zip(g.rewards, g.rollout_lengths, strict=True) for _ in range(n)]
    assert metrics["value"] == metrics["explained_variance"] == 0.0
    assert metrics["value_loss"] == pytest.approx(sum(reward**2 for reward in rewards) / 2 / len(rewards))


def test_a_critic_learns_returns_with_its_own_learning_rate(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, ragged_groups: list[Group]
) -> None:
    """Of a policy that stands still. Rollouts of a prompt begin in one state, so not all of it can be explained."""
    trainer = make_trainer(
        tiny_model("qwen3"), name="ppo", learning_rate=1e-12, iterations=1000, options={"critic_learning_rate": 1e-2}
    )
    explained = []
    for _ in range(40):
        trainer.accumulate(pack(ragged_groups, 40))
        explained.append(trainer.optimizer_step().metrics["explained_variance"])
    assert explained[0] == 0.0 and explained[-1] > 0.5


@pytest.mark.parametrize("reward", [0.0, 0.1, 3.0])
def test_no_variance_is_explained_where_all_returns_are_equal(
    reward: float,
    tiny_model: Callable[..., Path],
    reward_model: Callable[..., Path],
    make_trainer: MakeTrainer,
    ragged_groups: list[Group],
) -> None:
    """Values are others than 0, so returns are equal up to rounding only."""
    trainer = make_trainer(tiny_model("qwen3"), name="ppo", options={"critic_path": str(reward_model("qwen3"))})
    equal = [replace(group, rewards=(reward,) * len(group.rewards)) for group in ragged_groups]
    for groups in (equal, ragged_groups):
        trainer.accumulate(pack(groups, 40))
        explained = trainer.optimizer_step().metrics["explained_variance"]
        assert math.isnan(explained) == (groups is equal)


def test_bfloat16_trains_close_to_float32(
    tiny_model: Callable[..., Path],
    reward_model: Callable[..., Path],
    make_trainer: MakeTrainer,
    ragged_groups: list[Group],
) -> None:
    stats = {}
    for dtype in ("float32", "bfloat16"):
        trainer = make_trainer(
            tiny_model("qwen3"), name="ppo", dtype=dtype, options={"critic_path": str(reward_model("qwen3"))}
        )
        trainer.accumulate(pack(ragged_groups, 40))
        stats[dtype] = trainer.optimizer_step()
        assert trainer.critic is not None
        assert {p.main_grad.dtype for p in trainer.critic.model.parameters()} == {torch.float32}
    for name in ("value_loss", "critic_grad_norm"):
        assert stats["bfloat16"].metrics[name] == pytest.approx(stats["float32"].metrics[name], rel=0.05)
    assert stats["bfloat16"].grad_norm == pytest.approx(stats["float32"].grad_norm, rel=0.05)


def test_exact_mode_changes_rounding_only(
    tiny_model: Callable[..., Path],
    reward_model: Callable[..., Path],
    make_trainer: MakeTrainer,
    rollout_groups: list[Group],
    reproducible_products: None,
) -> None:
    steps = []
    for device in (None, choose_device("cpu", exact=True)):
        trainer = make_trainer(
            tiny_model("qwen3"), **PPO, device=device, options={**GAE, "critic_path": str(reward_model("qwen3"))}
        )
        trainer.accumulate(pack(rollout_groups, 40))
        steps.append(trainer.optimizer_step())
    plain, exact = steps
    assert exact.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)
    assert exact.metrics == pytest.approx(plain.metrics, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("whose", ["policy", "critic"])
def test_a_gradient_that_is_not_finite_stops_both(
    whose: str, tiny_model: Callable[..., Path], make_trainer: MakeTrainer, ragged_groups: list[Group]
) -> None:
    trainer = make_trainer(tiny_model("qwen3"), name="ppo")
    assert trainer.critic is not None
    models = {"policy": trainer.models.policy, "critic": trainer.critic.model}
    before = [p.detach().clone() for model in models.values() for p in model.parameters()]
    for number in range(4):
        trainer.accumulate([ragged_groups])
        next(models[whose].parameters()).main_grad[0, 0] = math.inf
        if number < 3:
            assert trainer.optimizer_step().skipped
    with pytest.raises(NonFiniteGradient):
        trainer.optimizer_step()
    after = [p for model in models.values() for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert trainer.optimizer.counts.skipped == 3 and trainer.critic.optimizer.counts.taken == 0


def test_discarded_groups_leave_no_trace_in_the_critic(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer, ragged_groups: list[Group]
) -> None:
    stats = []
    for discarded in ([], ragged_groups[:2]):
        trainer = make_trainer(tiny_model("qwen3"), name="ppo")
        for group in discarded:
            trainer.accumulate([[group]])
        trainer.discard()
        trainer.accumulate([ragged_groups])
        stats.append(trainer.optimizer_step())
    # But for the memory of this process, whose peak the second one may raise.
    first, second = (replace(each, memory_peak_bytes=None) for each in stats)
    assert first == second


def test_settings_of_a_critic_that_an_algorithm_of_ones_own_does_not_need_are_refused(
    tiny_model: Callable[..., Path], make_trainer: MakeTrainer
) -> None:
    name = f"python:{ROOT / 'examples/algorithm/my_algorithm.py'}:MedianBaseline"
    with pytest.raises(ConfigError, match=r"has the options below: correct algorithm\.options\.gamma"):
        make_trainer(tiny_model("qwen3"), name=name, options={"gamma": 0.9})


SEVERAL_STEPS: dict[str, dict[str, Any]] = {
    "algorithm": {"old_policy": "model", "options": {"critic_iterations_alone": 2}},
    "train": {"steps_per_batch": 2, "iterations": 4},
}
"""A run of these is interrupted while its critic learns alone."""


@pytest.mark.parametrize("more", [{}, SEVERAL_STEPS], ids=["one step", "several steps"])
def test_a_run_with_a_critic_goes_on_bit_for_bit(
    more: dict[str, dict[str, Any]],
    tiny_model: Callable[..., Path],
    parallel: Parallel,
    ragged_groups: list[Group],
    tmp_path: Path,
) -> None:
    own = more.get("algorithm", {})
    options = {"critic_learning_rate": 1e-2, **GAE, **own.get("options", {})}
    sections = {"optimizer": {"clip_grad_norm": 0.5}, **more, "algorithm": {**PPO, **own, "options": options}}
    batches = tmp_path / "batches"
    batches.write_bytes(pickle.dumps([ragged_groups[:3], ragged_groups[3:], ragged_groups[1:5]]))
    run = Run(str(tiny_model("qwen3", tied=True)), str(tmp_path / "a"), 3, (1, 3), sections, batches=str(batches))
    run(parallel)
    replace(run, directory=str(tmp_path / "b"), load=str(tmp_path / "a/iteration-000001"))(parallel)
    assert_same(tmp_path / "b/iteration-000003", tmp_path / "a/iteration-000003")
    saved = whole_tensors(tmp_path / "a/iteration-000003")
    assert saved["critic.output_layer.weight"].any() and saved["critic_exp_avg_sq.output_layer.weight"].any()
    names = {name.partition(".")[2] for name in saved if name.startswith("policy.")}
    for prefix in ("critic", "critic_exp_avg", "critic_exp_avg_sq"):
        own = {name.partition(".")[2] for name in saved if name.startswith(f"{prefix}.")}
        assert own == names | {"output_layer.weight"}


def test_what_a_critic_was_trained_with_must_not_change() -> None:
    def config(**critic: Any) -> Config:
        return run_config("model", algorithm={**PPO, "options": {**GAE, **critic}})

    saved = config().model_dump(mode="json")
    require_same_run(saved, config(critic_learning_rate=1e-3), "iteration-000001")
    with pytest.raises(ConfigError) as error:
        require_same_run(
            saved, config(gamma=1.0, value_clip=0.5, critic_path="other", critic_iterations_alone=3), "iteration-000001"
        )
    for line in (
        "algorithm.options.gamma is 1.0, but was 0.97",
        "algorithm.options.value_clip is 0.5, but was 0.2",
        "algorithm.options.critic_path is 'other', but was None",
        "algorithm.options.critic_iterations_alone is 3, but was 0",
    ):
        assert line in str(error.value)


@pytest.mark.nightly
@pytest.mark.distributed
def test_a_run_with_a_critic_goes_on_bit_for_bit_under_another_layout(
    tiny_model: Callable[..., Path], reward_model: Callable[..., Path], parallel: Parallel, tmp_path: Path
) -> None:
    """One step each, by a function of each weight alone."""
    stages = ["1", "tensor", "context", "pipeline", "interleaved", "replicas", "1 again"]
    model = str(tiny_model("qwen3", tied=True, num_hidden_layers=4))
    critic = str(reward_model("qwen3", num_hidden_layers=4))
    options = {"critic_path": critic, "critic_learning_rate": 1e-2}

    sections = {"algorithm": {**PPO, "options": options}}

    def stage(number: int) -> list[Run]:
        before = tmp_path / stages[number - 1] / f"iteration-00000{number}"
        directory = str(tmp_path / stages[number])
        return [Run(model, directory, number + 1, (number + 1,), sections, str(before) if number else None)]

    stage(0)[0](parallel)
    start(
        tmp_path,
        ({"tensor_parallel": 2}, stage(1)),
        ({"context_parallel": 2}, stage(2)),
        ({"pipeline_parallel": 2}, stage(3)),
        ({"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}, stage(4)),
        ({}, stage(5)),
    )
    stage(6)[0](parallel)
    whole = Run(model, str(tmp_path / "whole"), 7, tuple(range(1, 8)), sections)
    whole(parallel)
    for number, name in enumerate(stages):
        checkpoint = f"iteration-00000{number + 1}"
        assert_same(tmp_path / name / checkpoint, tmp_path / "whole" / checkpoint)


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_two_ranks_train_what_one_does(
    tiny_model: Callable[..., Path],
    reward_model: Callable[..., Path],
    parallel: Parallel,
    rollout_groups: list[Group],
    tmp_path: Path,
) -> None:
    """Two batches of two steps each; experts in half of the jobs."""
    jobs, expected = [], {}
    for family, layouts in FAMILIES_AND_LAYOUTS.items():
        options = {**GAE, "critic_path": str(reward_model(family)), "critic_learning_rate": 1e-3}
        for max_tokens in (10_000, 20):
            one = Job(
                f"{family}, {max_tokens} tokens",
                str(tiny_model(family)),
                [rollout_groups, rollout_groups],
                {"micro_batch_tokens": max_tokens},
                {**PPO, "old_policy": "model", "options": options},
                {"steps_per_batch": 2},
            )
            expected[one.name] = run(one, make_job_trainer(one, parallel, TrainerSection(**one.layout)), 0, 1)
            jobs += [
                replace(one, name=f"{one.name}, {name}", layout={**layout, **one.layout})
                for name, layout in layouts.items()
            ]
    # Jobs of one placement share its process groups.
    jobs.sort(key=lambda job: str(job.placement))
    run_distributed(jobs, 2, tmp_path, timeout_s=250)
    for job in jobs:
        report = json.loads((tmp_path / f"{job.name}.json").read_text())
        for step, one in zip(report["steps"], expected[job.name.rpartition(", ")[0]]["steps"], strict=True):
            found = {key: deviation(step[key], one[key]) for key in ("loss", "grad_norm")}
            found |= {key: deviation(step["metrics"][key], value) for key, value in one["metrics"].items()}
            # Later steps begin with weights that Adam has moved.
            assert max(found.values()) <= 5e-5, f"{job.name}: {found}"


def test_the_watch_of_the_device_is_told_of_each_pass_of_the_critic(
    tiny_model: Callable[..., Path],
    make_trainer: MakeTrainer,
    ragged_groups: list[Group],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A window may have any number of them, and each may take as long as one."""
    trainer = make_trainer(tiny_model("qwen3"), name="ppo", micro_batch_tokens=20)
    told: list[str] = []

    def each(parts: Iterable[T]) -> Iterator[T]:
        for part in parts:
            told.append("a part")
            yield part

    train = PackedPass.train
    monkeypatch.setattr(trainer.device_watch, "each", each)
    monkeypatch.setattr(PackedPass, "train", lambda *args: (told.append("a pass"), train(*args))[1])
    trainer.accumulate([[group] for group in ragged_groups])
    passes = [place for place, what in enumerate(told) if what == "a pass"]
    assert len(passes) > 2 and all(told[place - 1] == "a part" for place in passes), told
