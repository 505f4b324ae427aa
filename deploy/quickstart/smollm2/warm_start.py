"""Creates the base model: `python -m deploy.quickstart.smollm2.warm_start --seed N --run-dir DIR`.

SmolLM2-135M-Instruct knows what a sum is, but answers in sentences, and mostly wrongly. A few supervised steps on
problems of a separate set make it answer with a number alone, which is right for about a fifth: enough rewards to learn
from. Writes into the run's folder `base_model/`, `data/*.jsonl` and `warm_start.jsonl` (a record per check).
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from async_rl.config.file import load_config
from async_rl.errors import AsyncRLError
from async_rl.shared.programs.failure_report import report_failure
from deploy.quickstart.base_model import make_base_model, make_parser, write_data
from deploy.quickstart.kind import KINDS
from deploy.quickstart.smollm2.checkpoint import cached_checkpoint
from deploy.quickstart.smollm2.task import make_splits
from deploy.quickstart.splits import Row
from deploy.quickstart.supervised import Course, Example

COURSE = Course(
    batch_size=16,
    learning_rate=3e-5,
    ramp_steps=4,
    check_every=2,
    hopeless_loss=2.0,
    target_accuracy=0.18,
    max_steps=60,
)


def examples(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], system_prompt: str) -> list[Example]:
    """The rows as token ids, with prompts as the run renders them."""
    conversations = [
        [{"role": "system", "content": system_prompt}, {"role": "user", "content": row["prompt"]}] for row in rows
    ]
    texts = tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=True)
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    answers = tokenizer([row["answer"] + tokenizer.eos_token for row in rows], add_special_tokens=False)["input_ids"]
    return [Example(tuple(prompt), tuple(answer)) for prompt, answer in zip(prompts, answers, strict=True)]


def main(argv: Sequence[str]) -> int:
    arguments = make_parser("deploy.quickstart.smollm2.warm_start", COURSE).parse_args(argv)
    try:
        checkpoint = cached_checkpoint()
    except AsyncRLError as error:
        report_failure(error, os.environ)
        print(error, file=sys.stderr)
        return 2
    run_dir: Path = arguments.run_dir
    splits = make_splits(arguments.seed)
    write_data(run_dir, splits)
    system_prompt = load_config(KINDS["smollm2"].config).prompts.system_prompt
    assert system_prompt is not None
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    train, validation = (examples(tokenizer, rows, system_prompt) for rows in (splits.warm_start, splits.validation))
    course = replace(COURSE, max_steps=arguments.max_steps)
    make_base_model(run_dir, model, tokenizer, train, validation, course, arguments.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
