"""What a user's own algorithm returns or does wrongly is said, and never changes the on-policy proof."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from async_rl.config.pipeline import FOR_TRAINING
from async_rl.config.pipeline_section import PipelineNode
from async_rl.errors import ConfigError
from async_rl.method.types import Group
from tests.support.algorithms import algorithm_of, rollouts_of
from tests.trainer.test_algorithms import train_batch
from trainer.algorithm_checks import require_nodes, require_weights
from trainer.trainer import MegatronTrainer

HEAD = """
import math
import torch
from async_rl.method.algorithms import LossSum, Needs, PolicyGradient

class Mine(PolicyGradient):
"""
WRONG = [
    (
        "def advantages(self, r, totals): return torch.zeros(1)",
        r"Mine: advantages\(\) of group 0 is \[0.0\]: expected 3",
    ),
    (
        "def advantages(self, r, totals): return [0.0] * len(r.rewards)",
        r"advantages\(\) of group 0 is \[0.0, 0.0, 0.0\]",
    ),
    (
        "def advantages(self, r, totals): return torch.full((len(r.rewards),), math.nan)",
        r"is \[nan, nan, nan\]: expect",
    ),
    (
        "def weights(self, r): return torch.ones(len(r.rewards), 1)",
        r"weights\(\) of group 0 is \[\[1.0\], \[1.0\], \[1.0\]\]",
    ),
    ("def loss_sum(self, t, r): return -t.logprobs_N.sum()", r"loss_sum\(\) is .*: expected a LossSum, with a loss"),
    ("def loss_sum(self, t, r): return LossSum(-t.logprobs_N)", r"'loss' of loss_sum\(\) is \[.*: expected a LossSum"),
    (
        "def loss_sum(self, t, r): return LossSum(-t.logprobs_N.sum(), {'x': 1.0})",
        r"'x' of loss_sum\(\) is 1.0: expected",
    ),
    ("def loss_sum(self, t, r): return LossSum(-t.logprobs_N.sum(), {'entropy': t.entropy_N.sum()})", "another name"),
    (
        "def loss_sum(self, t, r): return LossSum(torch.zeros(()))",
        r"'loss' of loss_sum\(\) is 0\.0: expected a loss with a",
    ),
    ("def denominator(self, totals): return None", r"denominator\(\) is None: expected a finite number of 0 or more"),
    ("def denominator(self, totals): return -1.0", r"denominator\(\) is -1.0: expected"),
    ("def denominator(self, totals): return math.nan", r"denominator\(\) is nan: expected"),
    ("needs = Needs(reward_kl=True)", "needs a KL in the reward, but no reference, which it is to"),
]


def named(folder: Path, text: str) -> str:
    (folder / "mine.py").write_text(f"{HEAD}    {text}\n")
    return f"python:{folder / 'mine.py'}:Mine"


@pytest.mark.parametrize(("text", "says"), WRONG)
def test_what_an_algorithm_returns_wrongly_is_said(
    text: str,
    says: str,
    tiny_model: Callable[..., Path],
    make_trainer: Callable[..., MegatronTrainer],
    ragged_groups: list[Group],
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=says):
        trainer = make_trainer(tiny_model("qwen3"), name=named(tmp_path, text))
        train_batch(trainer, ragged_groups)
        trainer.optimizer_step()


@pytest.mark.parametrize("old_policy", ["reuse", "model"])
def test_an_algorithm_that_changes_its_tokens_does_not_change_the_proof(
    old_policy: str,
    tiny_model: Callable[..., Path],
    make_trainer: Callable[..., MegatronTrainer],
    ragged_groups: list[Group],
    tmp_path: Path,
) -> None:
    text = "def loss_sum(self, t, r): t.old_logprobs_N.fill_(-1.0); return super().loss_sum(t, r)"
    rows = [
        train_batch(make_trainer(tiny_model("qwen3"), name=name, old_policy=old_policy), ragged_groups)
        for name in ("grpo", named(tmp_path, text))
    ]
    assert rows[0] == rows[1]


def test_an_algorithm_without_totals_trains(
    tiny_model: Callable[..., Path],
    make_trainer: Callable[..., MegatronTrainer],
    ragged_groups: list[Group],
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(
        f"{HEAD}    def sums(self, r): return {{}}\n    def denominator(self, totals): return 7.0\n"
    )
    trainer = make_trainer(tiny_model("qwen3"), name=f"python:{tmp_path / 'mine.py'}:Mine")
    train_batch(trainer, ragged_groups)
    assert trainer.optimizer_step().grad_norm > 0


IGNORES = [
    ("def loss_sum(self, t, r): return LossSum(-t.logprobs_N.sum())", {}, ("token_weights", "token_rewards")),
    (
        "def _surrogate(self, t, a, r): return -t.logprobs_N * r.per_token(r.advantages_G, len(t)), {}",
        {},
        ("token_weights", "token_rewards"),
    ),
    ("needs = Needs(values=True)", {}, ("token_weights", "token_rewards")),
    ("pass", {"scale_by_std": "batch"}, ("token_rewards",)),
    ("pass", {}, ()),
]


@pytest.mark.parametrize(("text", "settings", "refused"), IGNORES)
def test_an_algorithm_that_does_not_use_what_nodes_write_is_refused(
    text: str, settings: dict[str, object], refused: tuple[str, ...], tmp_path: Path
) -> None:
    algorithm = algorithm_of(name=named(tmp_path, text), **settings)
    for writes in FOR_TRAINING:
        node = PipelineNode(name="n", function="python:n.py:f", reads=("rewards",), writes=writes)
        if writes in refused:
            with pytest.raises(ConfigError, match=f"'n' writes '{writes}', but algorithm Mine"):
                require_nodes(algorithm, [node])
        else:
            require_nodes(algorithm, [node])


@pytest.mark.parametrize(("name", "is_used"), [("grpo", True), ("cispo", True), ("gspo", True), ("online_dpo", False)])
def test_built_in_ones_use_them_or_are_refused(name: str, is_used: bool) -> None:
    node = PipelineNode(name="n", function="python:n.py:f", reads=("rewards",), writes="token_rewards")
    with nullcontext() if is_used else pytest.raises(ConfigError, match="no place for numbers of tokens"):
        require_nodes(algorithm_of(name=name), [node])


@pytest.mark.parametrize("body", ["torch.ones(len(r.rewards))", "torch.tensor([1.0 if w else 0.0 for w in r.weights])"])
def test_weights_of_rollouts_that_an_algorithm_leaves_out_are_refused(body: str, tmp_path: Path) -> None:
    algorithm = algorithm_of(name=named(tmp_path, f"def weights(self, r): return {body}"))
    rollouts = replace(rollouts_of([0.0, 1.0]), weights=(0.5, 2.0))
    with pytest.raises(ConfigError, match=r"expected .* its own times `rollouts.weights`"):
        require_weights(algorithm, rollouts, algorithm.weights(rollouts))
    plain = algorithm_of()
    require_weights(plain, rollouts, plain.weights(rollouts))
