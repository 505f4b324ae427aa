"""Sizes of the paged cache and of the steps of continuous batching, from the user's options.

By default transformers takes most of the memory and sizes its index tensors accordingly, which makes a small model an
order of magnitude slower.
"""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedConfig

from async_rl.errors import ConfigError

PAGE_SIZE: Final = 32
"""Tokens per cache page; prefixes are shared by whole pages."""

PREFILL_TOKENS: Final = 512
"""Prompt tokens that one step may process besides one token of every running response."""

FREE_MARGIN: Final = 0.15
"""The scheduler starts no new prompt when less than this share of the cache is free."""

MEMORY_SHARE: Final = 0.4
"""Share of the memory that is free after loading that the cache and its step tensors may take."""


MEMINFO: Final = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class CacheSize:
    max_concurrency: int
    page_size: int
    num_blocks: int
    max_batch_tokens: int


def plan_cache(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, max_concurrency: int, max_model_len: int
) -> CacheSize:
    """Space for `max_concurrency` responses of full length, or for as many as fit into the memory.

    Raises:
        ConfigError: not even one response of full length fits.
    """
    blocks_per_response = math.ceil(max_model_len / PAGE_SIZE) + 1
    max_batch_tokens = max_concurrency + PREFILL_TOKENS
    wanted = math.ceil(max_concurrency * blocks_per_response / (1.0 - FREE_MARGIN)) + 1
    budget = MEMORY_SHARE * free_memory_bytes(device)
    affordable = int(budget / _bytes_per_block(config, dtype, max_batch_tokens))
    if affordable < blocks_per_response:
        raise ConfigError(
            f"one response of {max_model_len} tokens needs {blocks_per_response} cache pages, but only {affordable} "
            f"fit into {MEMORY_SHARE:.0%} of the free memory: lower --max-model-len"
        )
    return CacheSize(max_concurrency, PAGE_SIZE, min(wanted, affordable), max_batch_tokens)


def _bytes_per_block(config: PreTrainedConfig, dtype: torch.dtype, max_batch_tokens: int) -> float:
    """Keys and values of a page in all layers, and transformers' reserve per cached token for one step."""
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    keys_and_values = 2 * num_kv_heads * head_dim * config.num_hidden_layers
    # transformers also counts a mask of [step tokens, cached tokens], although this engine's attention needs none.
    reserved = (2 * num_heads + num_kv_heads) * head_dim + max_batch_tokens
    return float(PAGE_SIZE * dtype.itemsize * (keys_and_values + reserved))


def free_memory_bytes(device: torch.device) -> float:
    """The memory available now; if the system does not report it (not Linux), all of its memory."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    available = (
        re.search(r"^MemAvailable:\s+(\d+) kB$", MEMINFO.read_text(), re.MULTILINE) if MEMINFO.exists() else None
    )
    if available:
        return float(available[1]) * 1024
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
