"""Size of the store of keys and values, from the user's options and the memory there is."""

import os
import re
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedConfig

from async_rl.errors import ConfigError
from async_rl.shared.model_parts import DeltaNet
from inference_service.engine.delta_net import delta_net_of
from inference_service.engine.kernels import Width
from inference_service.engine.kv_store import MIN_CAPACITY

PREFILL_TOKENS: Final = 512
"""Prompt tokens that one step may process besides one token of every running response."""

CAPACITY_FACTOR: Final = 2
"""A segment has up to this many times the capacity of its tokens."""

STATES_PER_RESPONSE: Final = 3
"""Of gated delta nets: its own and its prompt's, and what stays free when no sequence is started."""

MEMORY_SHARE: Final = 0.4
"""Share of the memory that is free after loading that the store may take."""


MEMINFO: Final = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class CacheSize:
    """`max_tokens` counts the capacity of segments, which have up to `CAPACITY_FACTOR` times their tokens; of a model
    with gated delta nets each has a state, too, which counts as `state_tokens`."""

    max_concurrency: int
    prefill_tokens: int
    max_tokens: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    delta: DeltaNet | None = None
    state_tokens: int = 0


def plan_cache(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_concurrency: int,
    max_model_len: int,
    width: Width = int,
    reserved_bytes: int | None = None,
) -> CacheSize:
    """Space for `max_concurrency` responses of full length, or for as many as fit into the memory.

    Args:
        reserved_bytes: what weights will take of a device that is given up by other programs before; None, everything
            on it is there already.

    Raises:
        ConfigError: not even one response of full length fits.
    """
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    if getattr(config, "kv_lora_rank", None):
        # Latents are kept as each head's keys and values, both of the larger size.
        head_dim = max(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    # The CPU's attention computes in float32.
    dtype = torch.float32 if device.type == "cpu" and dtype.itemsize < 4 else dtype
    delta = delta_net_of(config)
    num_with_keys = config.num_hidden_layers - (0 if delta is None else len(delta.layers))
    bytes_per_token = 2 * num_kv_heads * head_dim * num_with_keys * dtype.itemsize
    # The experts of each layer, in two bytes each.
    bytes_per_token += 2 * config.num_hidden_layers * (getattr(config, "num_experts_per_tok", None) or 0)
    # Without attention or experts nothing is kept of a token.
    bytes_per_token = max(1, bytes_per_token)
    state_tokens = 0 if delta is None else ceil(_state_bytes(delta, dtype) / bytes_per_token)
    # Prompt and response, and the response's next place while it moves.
    max_width = width(max_model_len)
    needed = max(CAPACITY_FACTOR * 2 * max_width, 2 * MIN_CAPACITY) + 2 * state_tokens
    free = free_memory_bytes(device) if reserved_bytes is None else total_memory_bytes(device) - reserved_bytes
    affordable = int(MEMORY_SHARE * free / bytes_per_token)
    if affordable < needed:
        raise ConfigError(
            f"one response of {max_model_len} tokens needs {needed * bytes_per_token / 2**20:,.0f} MiB of cache, but "
            f"{MEMORY_SHARE:.0%} of the free memory are {affordable * bytes_per_token / 2**20:,.0f} MiB: "
            "lower --max-model-len"
        )
    # A prompt and a response have the least capacity each, however short they are.
    per_response = CAPACITY_FACTOR * max_width + 2 * MIN_CAPACITY + STATES_PER_RESPONSE * state_tokens
    max_tokens = min(max(max_concurrency * per_response, needed), affordable)
    return CacheSize(
        max_concurrency,
        PREFILL_TOKENS,
        max_tokens,
        config.num_hidden_layers,
        num_kv_heads,
        head_dim,
        dtype,
        delta,
        state_tokens,
    )


def _state_bytes(delta: DeltaNet, dtype: torch.dtype) -> int:
    """Of the states, float32, and of the last rows in all layers."""
    state = delta.num_value_heads * delta.key_dim * delta.value_dim * torch.float32.itemsize
    rows = (delta.conv_width - 1) * delta.num_key_heads * delta.mixed_size * dtype.itemsize
    return len(delta.layers) * (state + rows)


def total_memory_bytes(device: torch.device) -> float:
    """All memory of an accelerator, whoever has it now; of a CPU, what is free."""
    if device.type == "cpu":
        return free_memory_bytes(device)
    return float(torch.get_device_module(device).mem_get_info(device)[1])


def free_memory_bytes(device: torch.device) -> float:
    """The memory available now; if the system does not report it (not Linux), all of its memory."""
    if device.type != "cpu":
        return float(torch.get_device_module(device).mem_get_info(device)[0])
    available = (
        re.search(r"^MemAvailable:\s+(\d+) kB$", MEMINFO.read_text(), re.MULTILINE) if MEMINFO.exists() else None
    )
    if available:
        return float(available[1]) * 1024
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
