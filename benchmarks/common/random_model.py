"""Small random models as Hugging Face checkpoints, the same in every run; used by benchmarks and tests."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

EOS = 0
"""Ends a response, in the checkpoints of `save_random_qwen3`."""


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model of random float32 weights, a function of `config` and `seed`; so are later random numbers."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def save_random_qwen3(path: Path, *, dtype: torch.dtype = torch.float32, **size: Any) -> PreTrainedModel:
    """Writes a random Qwen3 to the directory `path`, without a tokenizer, and returns it.

    `size` has the names of `Qwen3Config`; embedding and head are one tensor by default.
    """
    config = Qwen3Config(**{"tie_word_embeddings": True, "bos_token_id": None, **size})
    # transformers wraps `to` as a function whose first argument would be the model.
    model: PreTrainedModel = random_model(config).to(dtype)  # type: ignore[arg-type]
    model.generation_config = GenerationConfig(eos_token_id=EOS)
    model.save_pretrained(path)
    return model


def save_word_tokenizer(path: Path, vocab_size: int) -> None:
    """A tokenizer of one token per word `w<i>`, with spaces between; token 0 is <eos>, 1 is <unk>."""
    words = ["<eos>", "<unk>", *(f"w{i}" for i in range(2, vocab_size))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(path)
