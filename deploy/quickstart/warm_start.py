"""Creates the quickstart's base model: `python -m deploy.quickstart.warm_start --seed N --run-dir DIR`.

A small random Qwen3 is trained on answers, with words of a separate set, until it solves about a third of the words:
with less, too few responses earn a reward to learn from; with more, GRPO has little left to improve. Writes into the
run's folder `base_model/` (checkpoint and tokenizer), `data/*.jsonl` and `warm_start.jsonl` (a record per check).
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from deploy.quickstart.base_model import make_base_model, make_parser, write_data
from deploy.quickstart.splits import Row
from deploy.quickstart.supervised import Course, Example
from deploy.quickstart.task import make_splits, make_tokenizer

# Towards the end the accuracy can rise by 0.05 within a few steps.
COURSE = Course(
    batch_size=64,
    learning_rate=2e-3,
    ramp_steps=20,
    check_every=2,
    hopeless_loss=0.45,
    target_accuracy=0.30,
    max_steps=600,
)


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A random Qwen3 of 0.4 million parameters with its end-of-response token configured."""
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=64,
        # Sequences are at most 24 tokens long: with the usual base most dimensions of a head would hardly distinguish
        # positions.
        rope_parameters={"rope_type": "default", "rope_theta": 30.0},
        **special,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, **special)
    return model


def examples(tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row]) -> list[Example]:
    """The rows as token ids."""
    prompts = tokenizer([row["prompt"] for row in rows])["input_ids"]
    answers = tokenizer([row["answer"] + tokenizer.eos_token for row in rows])["input_ids"]
    return [Example(tuple(prompt), tuple(answer)) for prompt, answer in zip(prompts, answers, strict=True)]


def main(argv: Sequence[str]) -> None:
    arguments = make_parser("deploy.quickstart.warm_start", COURSE).parse_args(argv)
    run_dir: Path = arguments.run_dir
    splits = make_splits(arguments.seed)
    write_data(run_dir, splits)
    tokenizer = make_tokenizer()
    torch.manual_seed(arguments.seed)
    model = make_model(tokenizer)
    train, validation = (examples(tokenizer, rows) for rows in (splits.warm_start, splits.validation))
    course = replace(COURSE, max_steps=arguments.max_steps)
    make_base_model(run_dir, model, tokenizer, train, validation, course, arguments.seed)


if __name__ == "__main__":
    main(sys.argv[1:])
