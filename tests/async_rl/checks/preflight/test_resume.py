"""What `check` and a start say of a checkpoint before anything runs: other settings, or another config.json.

tests/trainer/checkpoint/test_compatibility.py has what the trainer compares.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rl.checks.preflight.model import ModelFiles
from async_rl.checks.preflight.resume import require_resumable, shape_changes
from async_rl.config.file import parse_config
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.shared.model_shape import ModelShape
from tests.support.minimal_config import minimal_tree
from tests.support.published_models import CONFIGS

MODEL = CONFIGS["Qwen/Qwen3-8B"]
Configure = Callable[..., Config]


@pytest.fixture
def config(tmp_path: Path) -> Configure:
    """A config of a run in this directory that resumes; a checkpoint of that with rank 8 is there."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))

    def make(**sections: Any) -> Config:
        tree: dict[str, Any] = minimal_tree()
        given: dict[str, Any] = {
            "run": {"dir": str(tmp_path / "run"), "resume": True},
            "model": {"path": str(tmp_path / "model")},
            "adapter": {"rank": 8, "alpha": 16},
        }
        for section in tree.keys() | given.keys() | sections.keys():
            tree[section] = {**tree.get(section, {}), **given.get(section, {}), **sections.get(section, {})}
        return parse_config(tree, "here")

    checkpoint = tmp_path / "run" / "checkpoints" / "iteration-000003"
    checkpoint.mkdir(parents=True)
    shape = ModelFiles.find(str(tmp_path / "model"), is_whole=False).shape.as_json()
    content = {"config": make().model_dump(mode="json"), "contents": {"shape": shape}}
    (checkpoint / "manifest.json").write_text(json.dumps({"content": content}))
    return make


def test_the_same_settings_and_those_that_may_change_pass(config: Configure) -> None:
    require_resumable(config())
    require_resumable(config(optimizer={"learning_rate": 1e-3}, prompts={"source": "elsewhere.jsonl"}))
    # What the default of the algorithm is, only the trainer knows.
    require_resumable(config(algorithm={"clip_low": 0.2}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"adapter": {"alpha": 4}}, r"adapter\.alpha is 4\.0, but was 16\.0\nset them back"),
        ({"algorithm": {"kl_coef": 0.5}}, r"algorithm\.kl_coef is 0\.5, but was 0\.0"),
        ({"run": {"seed": 5}}, r"iteration-000003' belongs to another run:\n  run\.seed is 5, but was 0"),
    ],
)
def test_other_settings_are_named_unless_they_are_accepted(
    config: Configure, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        require_resumable(config(**sections))
    run = sections.get("run", {})
    require_resumable(config(**{**sections, "run": {**run, "accept_changes": True}}))
    require_resumable(config(**{**sections, "run": {**run, "resume": False}}))


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"rank": 4}, r"adapter\.rank is 4, but was 8"),
        ({"targets": ["v_proj", "q_proj"]}, r"adapter\.targets is \['q_proj', 'v_proj'\], but was \['all-linear'\]"),
    ],
)
@pytest.mark.parametrize("accepts", [False, True])
def test_adapters_that_the_checkpoint_does_not_have_are_never_accepted(
    config: Configure, adapter: dict[str, Any], message: str, accepts: bool
) -> None:
    with pytest.raises(ConfigError, match=message):
        require_resumable(config(adapter=adapter, run={"accept_changes": accepts}))


def test_the_same_targets_by_other_names_pass(config: Configure) -> None:
    mlp = ["up_proj", "gate_proj", "down_proj"]
    require_resumable(config(adapter={"targets": [*mlp, "v_proj", "q_proj", "k_proj", "o_proj"]}))


def test_another_config_of_the_same_weights_is_named(config: Configure, tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL | {"rope_theta": 5e5}))
    with pytest.raises(ConfigError, match=r"the model's rope_theta is 500000\.0, but was \d+\.0 \(config\.json of"):
        require_resumable(config())


BROKEN = (
    *(b"", b"[]", b"\xff", b"[" * 10**5, b'{"content": 5}', b'{"content": {"contents": 3}}'),
    *(
        b'{"content": {"config": 5}}',
        b'{"content": {"config": {"run": 5}}}',
        b'{"content": {"config": {}, "contents": null}}',
    ),
)


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_checkpoint_is_left_to_the_trainer(config: Configure, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run" / "checkpoints" / "iteration-000003" / "manifest.json").write_bytes(content)
    require_resumable(config(adapter={"rank": 4}))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_shape_is_the_same_after_it_was_json(name: str) -> None:
    shape = ModelShape.of_config(CONFIGS[name], "here")
    written = json.loads(json.dumps(shape.as_json()))
    assert written == shape.as_json() and not shape_changes(written, shape.as_json())
    # An earlier release knew fewer features.
    del written["window"]
    assert not shape_changes(written, shape.as_json())
