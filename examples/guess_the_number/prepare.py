"""Makes what the example trains: a random Qwen3 of 0.1 million parameters, its tokenizer, and the prompts.

    python examples/guess_the_number/prepare.py DIRECTORY [--seed N]
"""

import argparse
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parent))

from guess import WORDS, write_rows


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


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
    parser = argparse.ArgumentParser(description="Makes the model and the prompts of the example.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of the model's weights (default: %(default)s)")
    options = parser.parse_args()
    model = options.directory / "model"
    model.mkdir(parents=True, exist_ok=True)
    make_model(options.seed).save_pretrained(model)
    make_tokenizer().save_pretrained(model)
    write_rows(options.directory / "prompts.jsonl")
    print(f"made {model} and {options.directory / 'prompts.jsonl'}")


if __name__ == "__main__":
    main()
