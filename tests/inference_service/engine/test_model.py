"""What the embedded engine says of checkpoints that it cannot load."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from async_rl.errors import ConfigError
from inference_service.engine.kernels import EXACT
from inference_service.engine.model import load_model
from inference_service.engine.step import ModelStep


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_weights_that_were_copied_in_part_are_bad_input(
    tiny_model: Callable[..., Path], tmp_path: Path, share: float
) -> None:
    checkpoint = tmp_path / "cut"
    shutil.copytree(tiny_model("qwen3"), checkpoint)
    weights = checkpoint / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ConfigError, match=r"/cut' are damaged, or were copied only in part: .*; copy them again"):
        load_model(str(checkpoint), torch.device("cpu"), torch.float32)


def test_other_kinds_of_attention_are_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(tiny_model("llama"), tmp_path / "chunked"))
    config = json.loads((checkpoint / "config.json").read_text())
    kinds = {"layer_types": ["chunked_attention", "full_attention"]}
    (checkpoint / "config.json").write_text(json.dumps(config | kinds))
    with pytest.raises(ConfigError, match=r"has layers of \['chunked_attention'\]: the transformers engine serves"):
        load_model(str(checkpoint), torch.device("cpu"), torch.float32)


def test_windows_are_refused_where_the_engine_is_to_be_exact(tiny_model: Callable[..., Path]) -> None:
    model = load_model(str(tiny_model("olmo3")), torch.device("cpu"), torch.float32).model
    with pytest.raises(ConfigError, match=r"has layers with a window \(sliding_window 5\): exact mode"):
        ModelStep(model, EXACT)
    ModelStep(model)
