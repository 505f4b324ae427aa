"""Recorded groups are trained again without a pool: the same step, whatever the order."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from async_rl.config.file import parse_config
from async_rl.config.sections import Config
from async_rl.errors import OnPolicyViolation
from async_rl.method.types import Batch, Group, Response
from tests.support.trainer.drawn_groups import drawn_groups
from trainer.parallel import Parallel
from trainer.trainer import MegatronTrainer
from trainer.verify.recorded_groups import write_share
from trainer.verify.replay import replay
from trainer.verify.scoring import Scorer

NUM_GROUPS, NUM_RESPONSES, LENGTH = 5, 4, 20


@pytest.fixture
def make_config(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Config]:
    model = tiny_model("qwen3", tied=True)

    def make(name: str, **train: str) -> Config:
        tree: dict[str, dict[str, Any]] = {
            "run": {"dir": str(tmp_path / name)},
            "model": {"path": str(model)},
            "prompts": {"source": "rows.jsonl", "prompts_per_batch": NUM_GROUPS},
            "reward": {"name": "math"},
            "rollout": {"responses_per_prompt": NUM_RESPONSES},
            "optimizer": {"learning_rate": 1e-2},
            "trainer": {"micro_batch_tokens": 200},
            "train": {"iterations": 1, **train},
        }
        return parse_config(tree, "test")

    return make


def make_groups(config: Config, parallel: Parallel) -> list[Group]:
    """Groups in an order of completion, drawn from the model that the config names, with its log-probs."""
    rng = random.Random(3)
    rewards = tuple(rng.random() for _ in range(NUM_RESPONSES))
    drawn = drawn_groups(Path(config.model.path), NUM_GROUPS, NUM_RESPONSES, LENGTH, version="v0")
    groups = [replace(drawn[index], rewards=rewards) for index in (3, 0, 4, 1, 2)]
    scored = iter(Scorer(config, parallel, MegatronTrainer.of(config, parallel)).by_policy(groups, 1.0).tolist())

    def with_scores(response: Response) -> Response:
        return replace(response, logprobs=tuple(next(scored) for _ in range(LENGTH)))

    return [replace(group, responses=tuple(map(with_scores, group.responses))) for group in groups]


def write(directory: Path, groups: list[Group], missing: int = 0) -> None:
    """Without the first `missing` groups that finished."""
    batch = Batch(0, {group.index: group.prompt for group in sorted(groups, key=lambda group: group.index)})
    write_share(directory, 0, batch, "v0", groups[missing:])


def test_a_replay_in_any_order_takes_the_step_of_the_groups_and_proves_it(
    make_config: Callable[..., Config], parallel: Parallel, tmp_path: Path
) -> None:
    runs = {
        "synchronous": make_config("synchronous", mode="synchronous", order="prompt"),
        "again": make_config("again", mode="periodic", order="prompt"),
        "completion": make_config("completion", mode="periodic", order="completion"),
    }
    write(tmp_path / "groups", make_groups(runs["again"], parallel))
    for config in runs.values():
        replay(config, parallel, tmp_path / "groups")
    records = {name: json.loads((tmp_path / name / "metrics.jsonl").read_text()) for name in runs}
    models = {name: load_file(tmp_path / name / "model" / "model.safetensors") for name in runs}
    assert records["again"]["grad_norm"] == records["synchronous"]["grad_norm"] > 0
    assert all(torch.equal(tensor, models["again"][name]) for name, tensor in models["synchronous"].items())
    assert records["completion"]["grad_norm"] == pytest.approx(records["again"]["grad_norm"], rel=1e-4)
    proof = json.loads((tmp_path / "completion" / "ledger.jsonl").read_text())
    assert proof["on_policy"] and proof["versions"] == ["v0"] and proof["num_groups"] == NUM_GROUPS


def test_a_recording_that_lacks_a_group_is_no_batch(
    make_config: Callable[..., Config], parallel: Parallel, tmp_path: Path
) -> None:
    config = make_config("run", mode="synchronous", order="prompt")
    write(tmp_path / "groups", make_groups(config, parallel), missing=1)
    with pytest.raises(OnPolicyViolation, match=r"group 3 .* trained 0 times"):
        replay(config, parallel, tmp_path / "groups")
