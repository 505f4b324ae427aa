"""What a safetensors file holds, read without torch, against torch's own reading."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from async_rl.checks.preflight import weight_files
from async_rl.checks.preflight.weight_files import FLOATS, LAYERS, require_names, stored_tensors, tensors_of
from async_rl.errors import ConfigError
from async_rl.shared.model_families import TABLE
from async_rl.shared.model_shape import ModelShape

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@pytest.mark.parametrize("dtype", FLOATS)
@given(data=st.data())
def test_values_that_are_not_finite_are_found_wherever_they_are(
    dtype: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Values of any bits: large, tiny, negative, both zeros, and beyond float32, in which factors are held."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_files, "PIECE_BYTES", 16)
        size = FLOATS[dtype][0]
        bits = data.draw(st.binary(min_size=size, max_size=30 * size))
        bits = bits[: len(bits) // size * size]
        if data.draw(st.booleans()):
            special = torch.tensor([data.draw(st.sampled_from([float("inf"), float("-inf"), float("nan")]))])
            bits += special.to(DTYPES[dtype]).view(torch.uint8).numpy().tobytes()
        values = torch.frombuffer(bytearray(bits), dtype=DTYPES[dtype])
        file = Path(tmp_path_factory.getbasetemp()) / f"{dtype}.safetensors"
        save_file({"x": values}, file)
        assert tensors_of(file)["x"].is_finite() == bool(values.float().isfinite().all())


def test_the_largest_float64_that_float32_holds_is_finite_and_the_next_one_is_not(tmp_path: Path) -> None:
    largest = torch.tensor(math.nextafter(weight_files.PAST_FLOAT32, 0), dtype=torch.float64)
    after = torch.tensor(weight_files.PAST_FLOAT32, dtype=torch.float64)
    assert largest.float().isfinite() and after.float().isinf()
    save_file({"largest": largest, "after": after}, tmp_path / "x.safetensors")
    found = tensors_of(tmp_path / "x.safetensors")
    assert found["largest"].is_finite() and not found["after"].is_finite()


@pytest.mark.parametrize("family", TABLE)
def test_a_tensor_that_no_layer_has_is_missed_in_every_family(family: str, tiny_model: Callable[..., Path]) -> None:
    """As after a conversion that does not know a name: engines would begin with random or neutral values there."""
    path = tiny_model(family)
    shape = ModelShape.of_config(json.loads((path / "config.json").read_text()), family)
    tensors = stored_tensors(path)
    require_names(family, shape, tensors)

    def kind_of(name: str) -> str:
        return re.sub(r"\d+", "N", name)

    for kind in {kind_of(name) for name in tensors if name.startswith(LAYERS)}:
        with pytest.raises(ConfigError, match="has no tensor"):
            require_names(family, shape, {name: at for name, at in tensors.items() if kind_of(name) != kind})
