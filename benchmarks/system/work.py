"""The work that all variants do: model, prompts, reward and config."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from async_rl.config.file import parse_config
from async_rl.config.sections import Config
from benchmarks.common.random_model import SIZES, save_endless_qwen3, save_word_tokenizer
from benchmarks.system.variants import Variant

SEED = 1
KL_COEF = 0.05
LEARNING_RATE = 1e-4

REWARD = """
def even_words(prompt, responses, row):
    words = [response.text.split() for response in responses]
    return [sum(int(word[1:]) % 2 == 0 for word in found) / max(len(found), 1) for found in words]
"""


@dataclass(frozen=True, slots=True)
class Case:
    """Every iteration trains `num_prompts` prompts of `prompt_tokens` tokens, each with `num_responses` responses.

    Every response has `response_tokens` tokens. The instance generates `groups_at_once` groups at a time.
    """

    size: str
    prompt_tokens: int
    response_tokens: int
    num_responses: int
    num_prompts: int
    groups_at_once: int

    @property
    def token_ratio(self) -> float:
        """Rows of unshared samples / rows of shared prompts."""
        responses = self.num_responses * self.response_tokens
        return (self.num_responses * self.prompt_tokens + responses) / (self.prompt_tokens + responses)


def prepare(case: Case, num_iterations: int, directory: Path) -> None:
    """Writes model, tokenizer, prompts and reward."""
    size = SIZES[case.size]
    length = case.prompt_tokens + case.response_tokens
    save_endless_qwen3(directory / "model", max_position_embeddings=length, **size)
    save_word_tokenizer(directory / "model", size["vocab_size"])
    draw = random.Random(SEED)
    prompts = (
        " ".join(f"w{draw.randrange(2, size['vocab_size'])}" for _ in range(case.prompt_tokens))
        for _ in range(case.num_prompts * num_iterations)
    )
    (directory / "rows.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    (directory / "reward.py").write_text(REWARD)


def make_config(case: Case, variant: Variant, num_iterations: int, directory: Path, url: str) -> Config:
    return parse_config(
        {
            "run": {"dir": str(directory / variant.name), "seed": SEED},
            "model": {"path": str(directory / "model")},
            "prompts": {
                "source": str(directory / "rows.jsonl"),
                "prompts_per_batch": case.num_prompts,
                "max_prompt_tokens": case.prompt_tokens,
                "chat_template": False,
            },
            "rollout": {
                "responses_per_prompt": case.num_responses,
                "max_response_tokens": case.response_tokens,
            },
            "reward": {"name": f"python:{directory / 'reward.py'}:even_words"},
            "pool": {"instances": [url]},
            "algorithm": {"kl_coef": KL_COEF, "old_policy": variant.old_policy},
            "optimizer": {"learning_rate": LEARNING_RATE},
            "train": {"iterations": num_iterations, "mode": variant.mode},
            "checkpoint": {"every": 0},
        },
        source="benchmarks.system",
    )
