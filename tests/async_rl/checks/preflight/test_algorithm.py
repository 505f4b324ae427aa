"""A teacher or a critic that cannot read the policy's tokens is named before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.checks.preflight import find_faults
from async_rl.checks.preflight.model import ModelFiles, require_other_models
from async_rl.config.file import parse_config
from async_rl.errors import ConfigError
from tests.support.minimal_config import minimal_tree
from tests.support.published_models import WEIGHTS

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}


def checkpoint(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **SIZES, **changes}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    return folder


def require(teacher: Path | str, policy: Path, **trainer: int) -> None:
    tree = minimal_tree() | {"algorithm": {"teacher": str(teacher)}, "trainer": trainer}
    num_ranks = trainer.get("tensor_parallel", 1)
    require_other_models(parse_config(tree, "here"), ModelFiles.find(str(policy)), num_ranks)


def test_a_teacher_of_another_shape_with_the_same_vocabulary_passes(tmp_path: Path) -> None:
    larger = checkpoint(tmp_path / "t", model_type="qwen2", num_hidden_layers=4, intermediate_size=96)
    require(larger, checkpoint(tmp_path / "p"), tensor_parallel=2)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vocab_size": 128}, r"algorithm\.teacher .*/t' has a vocabulary of 128 tokens, model\.path .* one of 96"),
        ({"model_type": "gpt2"}, r"algorithm\.teacher .* has model_type 'gpt2', which the trainer does not support"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 1},
            r"algorithm\.teacher .*/t', which has .* layout: .*tensor_parallel = 2 does not divide .* 3 attention he",
        ),
    ],
)
def test_a_teacher_that_cannot_score_is_named(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        require(checkpoint(tmp_path / "t", **changes), checkpoint(tmp_path / "p"), tensor_parallel=2)


def test_a_teacher_that_is_not_there_is_named_by_its_setting(tmp_path: Path) -> None:
    policy = checkpoint(tmp_path / "p")
    with pytest.raises(ConfigError, match=r"algorithm\.teacher '/no/such' does not exist"):
        require("/no/such", policy)
    (checkpoint(tmp_path / "t") / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"algorithm\.teacher .* has no \*\.safetensors"):
        require(tmp_path / "t", policy)


def test_a_critic_that_cannot_read_the_policys_tokens_is_named_by_its_setting(tmp_path: Path) -> None:
    policy, other = checkpoint(tmp_path / "p"), checkpoint(tmp_path / "c", vocab_size=128)
    tree = minimal_tree() | {"algorithm": {"name": "ppo", "options": {"critic_path": str(other)}}}
    with pytest.raises(ConfigError, match=r"critic_path .*/c' has a vocabulary of 128 tokens, .* reads the policy's"):
        require_other_models(parse_config(tree, "here"), ModelFiles.find(str(policy)), 1)


def test_ranks_that_are_started_by_hand_are_compared_with_model_and_batch(tmp_path: Path) -> None:
    tree = minimal_tree() | {"model": {"path": str(checkpoint(tmp_path / "p"))}}
    config = parse_config(tree, "here")

    def said(num_ranks: int) -> str:
        return "\n".join(
            str(each.error) for each in find_faults(config, trains=True, serves=False, num_ranks=num_ranks)
        )

    assert "there are 5 replicas" in said(5) and "replicas" not in said(4)
    config = parse_config(tree | {"trainer": {"tensor_parallel": 2}}, "here")
    assert said(3).count("3 training ranks (trainer.num_processes) cannot form replicas") == 1
