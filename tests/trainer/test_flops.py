import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from async_rl.checks.preflight.adapter_sizes import layer_parameters
from async_rl.checks.preflight.model import read_shape
from async_rl.config.adapter_section import AdapterSection
from async_rl.method.group_proof import GroupProof
from async_rl.records.throughput import ModelSize, TrainingPool
from tests.support.groups import random_group
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


def without_projections(size: ModelSize, **kept: int) -> ModelSize:
    """Only what is asked for counts."""
    nothing = dict.fromkeys(("num_layer_parameters", "num_output_parameters", "attention_width", "windowed_width"), 0)
    return replace(size, **{**nothing, "state_products": 0, **kept})


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_5_text"])
def test_products_of_rows_are_those_that_are_counted_in_transformers(
    family: str, tiny_model: Callable[..., Path]
) -> None:
    """A sequence of one token has no pairs but its own, which are left out, and states begin at 0."""
    checkpoint = tiny_model(family)
    size = ModelSize.of(read_shape(checkpoint))
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    counted: list[int] = []
    for module in linear:
        module.register_forward_pre_hook(lambda module, _: counted.append(2 * module.weight.numel()))
    model(torch.tensor([[5]]))
    assert sum(counted) == 2 * (size.num_layer_parameters + size.num_output_parameters)


@pytest.mark.parametrize("family", ["qwen3", "olmo3", "gemma3_text"])
def test_pairs_of_queries_and_keys_are_those_of_transformers_masks(
    family: str, tiny_model: Callable[..., Path]
) -> None:
    """But for half of the diagonal, which the formula leaves out."""
    checkpoint = tiny_model(family)
    shape, config = read_shape(checkpoint), AutoConfig.from_pretrained(checkpoint)
    prompt_len = random.randrange(1, 30)
    lens = [random.randrange(1, 60) for _ in range(3)]
    group = random_group(0, prompt_len, lens)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * shape.num_layers
    assert (set(kinds) == {"full_attention"}) == (family == "qwen3")
    expected = 0.0
    for kind in kinds:
        window = config.sliding_window if kind == "sliding_attention" else None
        # Each rollout after the prompt, the prompt once.
        whole = [mask_of(prompt_len + length, window) for length in lens]
        pairs = float(whole[0][:prompt_len].sum()) + sum(float(mask[prompt_len:].sum()) for mask in whole)
        expected += 4 * shape.num_heads * shape.head_dim * pairs
    size = ModelSize.of(shape)
    ours = without_projections(size, attention_width=size.attention_width, windowed_width=size.windowed_width)
    diagonal = 4 * shape.num_heads * shape.head_dim * shape.num_layers * (prompt_len + sum(lens))
    assert abs(ours.forward_flops(GroupProof.of(group, {})) - expected) <= diagonal


def mask_of(num_tokens: int, window: int | None) -> torch.Tensor:
    """Which of so many tokens attends to which: those up to itself, of which `window` are the last."""
    distance = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)
    return (distance >= 0) & (distance < (num_tokens if window is None else window))


def test_products_of_states_are_those_that_are_counted_in_the_recurrence(tiny_model: Callable[..., Path]) -> None:
    shape = read_shape(tiny_model("qwen3_5_text"))
    assert shape.delta is not None
    delta, group = shape.delta, random_group(0, 3, (4, 2))
    with FlopCounterMode(display=False) as counter:
        for _ in delta.layers:
            state = torch.zeros(delta.num_value_heads, delta.value_dim, delta.key_dim)
            for _ in range(3 + 4 + 2):
                query, key = torch.rand(2, delta.num_value_heads, delta.key_dim, 1)
                value = torch.rand(delta.num_value_heads, delta.value_dim, 1)
                state = 0.9 * state + 0.5 * (value - 0.9 * state @ key) @ key.mT
                _ = state @ query
    size = ModelSize.of(shape)
    ours = without_projections(size, state_products=size.state_products)
    assert ours.forward_flops(GroupProof.of(group, {})) == counter.get_total_flops() > 0


def test_beside_adapters_frozen_weights_have_no_gradients_of_theirs(tiny_model: Callable[..., Path]) -> None:
    """But for the inputs of the first layer, whose gradients nothing needs."""
    checkpoint, num_rows = tiny_model("qwen3"), 7
    shape = read_shape(checkpoint)
    size = ModelSize.of(shape, shape.num_layers * layer_parameters(AdapterSection(rank=2), shape, 1))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    with FlopCounterMode(display=False) as counter:
        adapted(torch.arange(num_rows)[None]).logits.sum().backward()
    unneeded = sum(
        parameter.numel()
        for name, parameter in adapted.named_parameters()
        if "layers.0.self_attn." in name and name.endswith(("base_layer.weight", "lora_A.default.weight"))
        if "o_proj" not in name
    )
    # All pairs of rows, also those that the mask leaves out.
    pairs = 3 * 4 * size.attention_width * num_rows**2
    row = replace(GroupProof.of(random_group(0, 1, (num_rows,)), {}), num_prompt_tokens=0, rollout_lengths=(num_rows,))
    ours = TrainingPool(1, replace(size, attention_width=0)).model_flops([row], 0)
    assert counter.get_total_flops() == ours + pairs - 2 * unneeded * num_rows


def test_the_peak_is_that_of_the_device_by_name() -> None:
    assert peak_of_name("NVIDIA H100 80GB HBM3") == 989e12 and peak_of_name("NVIDIA H100 PCIe") == 756e12
    assert peak_of_name("NVIDIA H100 NVL") == peak_of_name("NVIDIA H200 NVL") == 835e12
    assert (peak_of_name("NVIDIA B200"), peak_of_name("NVIDIA GB200")) == (2250e12, 2500e12)
    assert peak_of_name("Ascend910B2C") == peak_of_name("Ascend910_9392") == 376e12
    assert peak_of_name("Ascend910B3") == 313e12
    assert all(peak_of_name(name) is None for name in ("NVIDIA GeForce GTX 1080", "Ascend910B4", "Ascend910_9372"))
