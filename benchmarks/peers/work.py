"""The work that both sides do: its model, prompts, reward and config."""

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.case import RESPONSE_TOKENS, Case
from benchmarks.common.random_model import SIZES, save_endless_qwen3, save_word_tokenizer

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
engine = "{engine}"
{python}
"""


class Engine(NamedTuple):
    """What async-rl's instance runs on; `python` by default is that of the benchmark."""

    name: str = "transformers"
    python: str | None = None


EMBEDDED = Engine()


def prepare(case: Case, kl_coef: float, directory: Path, iterations: int, engine: Engine = EMBEDDED) -> dict[str, Any]:
    """Writes model, tokenizer, prompts, reward and config; returns what TRL's side needs to know."""
    size = SIZES[case.size]
    save_endless_qwen3(directory / "model", max_position_embeddings=case.prompt_tokens + RESPONSE_TOKENS, **size)
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
        "kl_coef": kl_coef,
        "iterations": iterations,
    }
    python = f"python = {json.dumps(engine.python)}" if engine.python else ""
    (directory / "run.toml").write_text(CONFIG.format(**known, engine=engine.name, python=python))
    return {**known, "model": str(directory / "model"), "rows": str(rows)}
