"""What a publish sends, as `async-rl check` says before a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.checks.forecast.run_forecast import forecast_run
from async_rl.checks.preflight.model import ModelFiles
from async_rl.config.file import parse_config
from tests.support.minimal_config import minimal_tree
from tests.support.published_models import CONFIGS


@pytest.mark.parametrize("publish", ["auto", "merged"])
def test_a_publish_of_adapters_is_that_of_their_factors(publish: str, tmp_path: Path) -> None:
    config = CONFIGS["Qwen/Qwen3-8B"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    files = ModelFiles.find(str(tmp_path), is_whole=False)
    adapter: dict[str, Any] = {"rank": 8, "alpha": 16, "targets": ["o_proj"], "publish": publish}
    tree = {**minimal_tree(), "model": {"path": str(tmp_path), "dtype": "bfloat16"}, "adapter": adapter}
    found = forecast_run(parse_config(tree, "here"), files.shape).publish_bytes
    inputs, outputs = config["num_attention_heads"] * config["head_dim"], config["hidden_size"]
    factors = 4 * config["num_hidden_layers"] * 8 * (inputs + outputs)
    assert found == (factors if publish == "auto" else 2 * files.shape.num_parameters)
