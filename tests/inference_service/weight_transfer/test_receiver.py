"""Where a weight update puts its tensors: one view per checkpoint tensor, of the model's own memory."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from inference_service.weight_transfer.receiver import parameter_views, specs_of


@pytest.mark.parametrize(
    ("family", "tied"),
    [("qwen3_moe", False), ("qwen3_moe", True), ("qwen2", True), ("gpt_oss", False), ("minimax_m2", False)],
)
def test_views_have_the_names_and_values_of_the_checkpoint(
    family: str,
    tied: bool,
    tiny_model: Callable[..., Path],
    load_reference: Callable[[Path], torch.nn.Module],
) -> None:
    checkpoint = tiny_model(family, tied=tied)
    original = load_file(checkpoint / "model.safetensors")
    # A constant, which is not published.
    original = {name: tensor for name, tensor in original.items() if not name.endswith("e_score_correction_bias")}
    model = load_reference(checkpoint)
    views = parameter_views(model)
    assert set(views) == set(original)
    assert all(torch.equal(views[name], original[name]) for name in original)
    assert {name: spec.shape for name, spec in specs_of(views).items()} == {
        name: tuple(tensor.shape) for name, tensor in original.items()
    }
    for view in views.values():
        assert view.is_contiguous()
        view.fill_(7.0)
    assert all(bool((parameter == 7.0).all()) for parameter in model.parameters())
