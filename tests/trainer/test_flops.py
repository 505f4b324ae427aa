from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from async_rl.checks.preflight.model import read_shape
from async_rl.records.throughput import ModelSize
from trainer.devices.peak_flops import peak_of_name


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_the_size_of_a_dense_model_is_that_of_the_projections_in_its_checkpoint(
    family: str, tiny_model: Callable[..., Path]
) -> None:
    checkpoint = tiny_model(family)
    size = ModelSize.of(read_shape(checkpoint))
    with safe_open(checkpoint / "model.safetensors", "pt") as tensors:
        shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    projections = [
        rows * columns for name, (rows, *rest) in shapes.items() if "_proj.weight" in name for columns in rest
    ]
    assert size.num_layer_parameters == sum(projections)
    rows, columns = shapes["model.embed_tokens.weight"]
    assert size.num_output_parameters == rows * columns


def test_of_experts_those_count_that_a_token_uses(tiny_model: Callable[..., Path]) -> None:
    shape = read_shape(tiny_model("qwen3_moe"))
    assert shape.experts is not None
    one_expert = 3 * shape.hidden_size * shape.experts.ffn_size
    router = shape.hidden_size * shape.experts.num_experts
    attention = 2 * shape.hidden_size * shape.head_dim * (shape.num_heads + shape.num_kv_heads)
    per_layer = attention + router + shape.experts.top_k * one_expert
    assert ModelSize.of(shape).num_layer_parameters == shape.num_layers * per_layer


def test_the_peak_is_that_of_the_device_by_name() -> None:
    assert peak_of_name("NVIDIA H100 80GB HBM3") == 989e12 and peak_of_name("NVIDIA H100 PCIe") == 756e12
    assert peak_of_name("NVIDIA H100 NVL") == peak_of_name("NVIDIA H200 NVL") == 835e12
    assert (peak_of_name("NVIDIA B200"), peak_of_name("NVIDIA GB200")) == (2250e12, 2500e12)
    assert peak_of_name("Ascend910B2C") == peak_of_name("Ascend910_9392") == 376e12
    assert peak_of_name("Ascend910B3") == 313e12
    assert all(peak_of_name(name) is None for name in ("NVIDIA GeForce GTX 1080", "Ascend910B4", "Ascend910_9372"))
