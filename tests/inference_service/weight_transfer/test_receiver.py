"""Where a weight update puts its tensors: one place per checkpoint tensor, in the model's own memory."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from inference_service.weight_transfer.receiver import model_places, specs_of


@pytest.mark.parametrize(("family", "tied"), [("qwen3_moe", False), ("qwen3_moe", True), ("qwen2", True)])
def test_places_have_the_names_and_values_of_the_checkpoint(
    family: str,
    tied: bool,
    tiny_model: Callable[..., Path],
    load_reference: Callable[[Path], torch.nn.Module],
) -> None:
    checkpoint = tiny_model(family, tied=tied)
    original = load_file(checkpoint / "model.safetensors")
    model = load_reference(checkpoint)
    places = model_places(model)
    assert set(places) == set(original)
    assert all(torch.equal(places[name], original[name]) for name in original)
    assert {name: spec.shape for name, spec in specs_of(places).items()} == {
        name: tuple(tensor.shape) for name, tensor in original.items()
    }
    for place in places.values():
        assert place.is_contiguous()
        place.fill_(7.0)
    assert all(bool((parameter == 7.0).all()) for parameter in model.parameters())
