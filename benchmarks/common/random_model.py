"""Small random models as Hugging Face checkpoints, the same in every run; used by benchmarks and tests."""

from collections.abc import Iterable, Sequence
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

STEP = 1e-6

EOS = 0
"""Ends a response, in the checkpoints of `save_random_qwen3`."""

TINY: dict[str, int] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
"""To see that a benchmark of a publish runs: its figures say nothing."""

SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "2M": {
        "vocab_size": 2048,
        "hidden_size": 192,
        "intermediate_size": 576,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "31M": {
        "vocab_size": 16_384,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "135M": {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
}
"""Sizes that benchmarks compare engines at, by names that tell the number of parameters."""


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


def save_endless_qwen3(path: Path, **size: Any) -> None:
    """As `save_random_qwen3`, in float32, of a model whose responses nothing ends early."""
    model = save_random_qwen3(path, **size)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    model.save_pretrained(path)


def save_word_tokenizer(path: Path, vocab_size: int, chat_template: str | None = None) -> None:
    """A tokenizer of one token per word `w<i>`, with spaces between; token 0 is <eos>, 1 is <unk>."""
    words = ["<eos>", "<unk>", *(f"w{i}" for i in range(2, vocab_size))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    fast.chat_template = chat_template
    fast.save_pretrained(path)


def step(masters: Sequence[torch.Tensor], stream: Iterable[tuple[object, torch.Tensor]]) -> None:
    """Adds 1e-6 or takes it from each weight in float32, as AdamW does at that rate, and rounds."""
    for master, (_, weight) in zip(masters, stream, strict=True):
        master += STEP * (2 * torch.randint(0, 2, master.shape, dtype=torch.int8) - 1)
        weight.copy_(master)
