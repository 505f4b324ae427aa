"""The work that both sides do: its model, prompts, reward and config."""

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.random_model import SIZES, save_random_qwen3, save_word_tokenizer

RESPONSE_TOKENS = 64

REWARD = """
def even_words(prompt, responses, row):
    words = [response.text.split() for response in responses]
    return [sum(int(word[1:]) % 2 == 0 for word in found) / max(len(found), 1) for found in words]
"""

CONFIG = """
[run]
dir = "{directory}/run"
[model]
path = "{directory}/model"
[prompts]
source = "{directory}/rows.jsonl"
prompts_per_batch = {num_groups}
max_prompt_tokens = {prompt_tokens}
chat_template = false
[rollout]
responses_per_prompt = {group_size}
max_response_tokens = {response_tokens}
[reward]
name = "python:{directory}/reward.py:even_words"
[algorithm]
kl_coef = {kl_coef}
[optimizer]
learning_rate = 1e-4
[train]
iterations = {iterations}
[checkpoint]
every = 0
[inference]
max_concurrency = {num_responses}
"""


@dataclass(frozen=True, slots=True)
class Case:
    """`num_groups` prompts of `prompt_tokens` tokens with `group_size` responses each, and a reference if `kl_coef`."""

    size: str
    prompt_tokens: int
    group_size: int
    num_groups: int
    kl_coef: float

    @classmethod
    def parse(cls, text: str) -> "Case":
        size, *rest = text.removesuffix("+kl").split(":")
        are_numbers = len(rest) == 3 and all(number.isdecimal() and int(number) for number in rest)
        if size not in SIZES or not are_numbers:
            known = f"one of {', '.join(SIZES)}, and numbers from 1 on"
            raise argparse.ArgumentTypeError(f"{text!r}: expected SIZE:P:G:GROUPS, perhaps with +kl: {known}")
        prompt_tokens, group_size, num_groups = map(int, rest)
        return cls(size, prompt_tokens, group_size, num_groups, 0.05 if text.endswith("+kl") else 0.0)

    def __str__(self) -> str:
        numbers = f"{self.size}:{self.prompt_tokens}:{self.group_size}:{self.num_groups}"
        return numbers + ("+kl" if self.kl_coef else "")

    @property
    def num_responses(self) -> int:
        return self.group_size * self.num_groups

    @property
    def num_tokens(self) -> int:
        """Response tokens of one iteration."""
        return self.num_responses * RESPONSE_TOKENS


def prepare(case: Case, directory: Path, iterations: int) -> dict[str, Any]:
    """Writes model, tokenizer, prompts, reward and config; returns what TRL's side needs to know."""
    size = SIZES[case.size]
    model = save_random_qwen3(
        directory / "model",
        dtype=torch.float32,
        max_position_embeddings=case.prompt_tokens + RESPONSE_TOKENS,
        **size,
    )
    # Nothing ends a response early.
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    model.save_pretrained(directory / "model")
    save_word_tokenizer(directory / "model", size["vocab_size"])
    rng = random.Random(0)
    prompts = [
        " ".join(f"w{rng.randrange(2, size['vocab_size'])}" for _ in range(case.prompt_tokens))
        for _ in range(case.num_groups * iterations)
    ]
    rows = directory / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    (directory / "reward.py").write_text(REWARD)
    known: dict[str, Any] = {
        "directory": str(directory),
        "prompt_tokens": case.prompt_tokens,
        "group_size": case.group_size,
        "num_groups": case.num_groups,
        "num_responses": case.num_responses,
        "response_tokens": RESPONSE_TOKENS,
        "kl_coef": case.kl_coef,
        "iterations": iterations,
    }
    (directory / "run.toml").write_text(CONFIG.format(**known))
    return {**known, "model": str(directory / "model"), "rows": str(rows)}
