"""What the embedded engine says of checkpoints that it cannot load."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from async_rl.errors import ConfigError
from inference_service.engine.model import load_model


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
