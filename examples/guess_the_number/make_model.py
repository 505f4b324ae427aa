"""Makes what the example trains: a random Qwen3 of 0.1 million parameters and its tokenizer.

python make_model.py model [--seed N]
"""

import argparse
from pathlib import Path

import torch
from guess import WORDS
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def make_model(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=32,
        rope_theta=30.0,
        tie_word_embeddings=True,
        eos_token_id=WORDS.index("<eos>"),
        pad_token_id=WORDS.index("<pad>"),
    )
    return Qwen3ForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the model of the example.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of the model's weights (default: %(default)s)")
    options = parser.parse_args()
    make_model(options.seed).save_pretrained(options.directory)
    make_tokenizer().save_pretrained(options.directory)


if __name__ == "__main__":
    main()
