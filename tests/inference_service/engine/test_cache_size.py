"""The cache is as large as the work needs, not as the memory allows."""

import pytest
import torch
from transformers import Qwen3Config

from async_rl.errors import ConfigError
from inference_service.engine.cache_size import CAPACITY_FACTOR, plan_cache

CPU = torch.device("cpu")


def test_cache_holds_all_responses_at_full_length() -> None:
    size = plan_cache(Qwen3Config(num_hidden_layers=2), torch.float32, CPU, max_concurrency=16, max_model_len=100)
    assert 16 * 100 <= size.max_tokens <= 16 * 100 * CAPACITY_FACTOR


def test_cache_stays_within_the_memory() -> None:
    config = Qwen3Config(num_hidden_layers=2)
    plenty = plan_cache(config, torch.float32, CPU, max_concurrency=512, max_model_len=30_000)
    assert plenty.max_tokens < 512 * 30_000


def test_one_response_must_fit() -> None:
    with pytest.raises(ConfigError, match="--max-model-len"):
        plan_cache(Qwen3Config(num_hidden_layers=80), torch.float32, CPU, max_concurrency=1, max_model_len=100_000_000)
