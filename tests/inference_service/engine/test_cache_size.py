"""The cache is as large as the work needs, not as the memory allows."""

import os

import pytest
import torch
from transformers import Qwen3Config

from async_rl.errors import ConfigError
from inference_service.engine import cache_size
from inference_service.engine.cache_size import CAPACITY_FACTOR, MEMORY_SHARE, free_memory_bytes, plan_cache
from inference_service.engine.kv_store import MIN_CAPACITY, KVStore
from inference_service.engine.schedule import FREE_MARGIN

CPU = torch.device("cpu")


def test_cache_holds_all_responses_at_full_length() -> None:
    size = plan_cache(Qwen3Config(num_hidden_layers=2), torch.float32, CPU, max_concurrency=16, max_model_len=100)
    assert 16 * 100 <= size.max_tokens <= 16 * (100 * CAPACITY_FACTOR + 2 * MIN_CAPACITY)


@pytest.mark.parametrize("max_model_len", [16, 24, 63, 64, 65, 128, 1000])
@pytest.mark.parametrize("responses_per_prompt", [1, 8])
def test_all_responses_run_at_once_however_short_they_are(max_model_len: int, responses_per_prompt: int) -> None:
    """Segments have a least capacity: counted by their tokens, half of the responses of 24 had to wait."""
    size = plan_cache(Qwen3Config(num_hidden_layers=1), torch.float32, CPU, 16, max_model_len)
    store = KVStore(size.num_layers, 1, 1, size.dtype, CPU, size.max_tokens)
    prompt = max_model_len // 2
    for _ in range(16 // responses_per_prompt):
        store.new(prompt, is_shared=True)
        for _ in range(responses_per_prompt):
            store.new(max_model_len - prompt, is_shared=False)
    assert store.num_tokens <= (1.0 - FREE_MARGIN) * size.max_tokens


def test_cache_stays_within_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Qwen3Config(num_hidden_layers=2)
    monkeypatch.setattr(cache_size, "free_memory_bytes", lambda device: 32 * 2.0**30)
    size = plan_cache(config, torch.float32, CPU, max_concurrency=512, max_model_len=30_000)
    bytes_per_token = 2 * size.num_kv_heads * size.head_dim * size.num_layers * torch.float32.itemsize
    assert size.max_tokens < 512 * 30_000
    assert size.max_tokens * bytes_per_token == pytest.approx(MEMORY_SHARE * 32 * 2**30, rel=1e-4)


def test_free_memory_is_positive_and_no_more_than_there_is() -> None:
    assert 0 < free_memory_bytes(CPU) <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_one_response_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_size, "free_memory_bytes", lambda device: 32 * 2.0**30)
    with pytest.raises(ConfigError, match="--max-model-len"):
        plan_cache(Qwen3Config(num_hidden_layers=80), torch.float32, CPU, max_concurrency=1, max_model_len=100_000_000)
