"""Router replay is refused where there are no routes to replay, with the setting that forbids it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rl.checks.preflight.model import ModelFiles
from async_rl.checks.preflight.train_modes import require_router_replay
from async_rl.errors import ConfigError
from tests.support.minimal_config import config_of

VLLM = {"engine": "vllm"}
OPTION = {"engine_options": ["--enable-return-routed-experts"]}


@pytest.mark.parametrize(
    ("sections", "family", "message"),
    [
        ({}, "qwen3", "is for models with experts, and model.path .* has none: set it to false"),
        ({"inference": VLLM}, "qwen3_moe", 'add "--enable-return-routed-experts" to inference.engine_options'),
    ],
)
def test_what_has_no_routes_is_refused(
    sections: dict[str, Any], family: str, message: str, tiny_model: Callable[..., Path]
) -> None:
    files = ModelFiles.find(str(tiny_model(family)))
    with pytest.raises(ConfigError, match=message):
        require_router_replay(config_of(train={"router_replay": True}, **sections), files)
    require_router_replay(config_of(train={"router_replay": False}, **sections), files)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss", "minimax_m2"])
def test_models_with_experts_have_routes(family: str, tiny_model: Callable[..., Path]) -> None:
    files = ModelFiles.find(str(tiny_model(family)))
    require_router_replay(config_of(train={"router_replay": True}), files)
    require_router_replay(config_of(train={"router_replay": True}, rollout={"program": "command:agent"}), files)
    require_router_replay(config_of(train={"router_replay": True}, inference=VLLM | OPTION), files)
    require_router_replay(
        config_of(train={"router_replay": True}, inference=VLLM, pool={"instances": ["http://a:1"]}), files
    )
