"""Which linear layers of a model may have adapters, and how many parameters these have."""

from collections.abc import Mapping
from math import ceil

from async_rl.config.adapter_section import AdapterSection, Target
from async_rl.shared.model_shape import ModelShape

ATTENTION: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
BY_COLUMNS = ("o_proj", "down_proj")
"""Those whose columns tensor-parallel ranks divide; of the others they divide the rows."""


def linear_sizes(model: ModelShape) -> dict[str, tuple[int, int]]:
    """Name within a layer, such as "self_attn.q_proj" -> (outputs, inputs); without experts, which have no adapters."""
    hidden, head = model.hidden_size, model.head_dim
    queries, keys = model.num_heads * head, model.num_kv_heads * head
    sizes = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    found = {f"self_attn.{name}": size for name, size in {**sizes, "o_proj": (hidden, queries)}.items()}
    if model.experts is None:
        ffn = dict.fromkeys(("gate_proj", "up_proj"), (model.ffn_size, hidden))
        found |= {f"mlp.{name}": size for name, size in {**ffn, "down_proj": (hidden, model.ffn_size)}.items()}
    return found


def targeted(adapter: AdapterSection, sizes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Those of the layers that have adapters."""
    return {name: size for name, size in sizes.items() if adapter.targets_layer(name)}


def layer_parameters(adapter: AdapterSection, model: ModelShape, tensor_parallel: int) -> int:
    """Of the adapters of one layer, on one of so many tensor-parallel ranks."""
    count = 0
    for name, (outputs, inputs) in targeted(adapter, linear_sizes(model)).items():
        divided, whole = (inputs, outputs) if name.rpartition(".")[2] in BY_COLUMNS else (outputs, inputs)
        count += (adapter.rank or 0) * (ceil(divided / tensor_parallel) + whole)
    return count
