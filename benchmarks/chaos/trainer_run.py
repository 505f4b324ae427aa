"""One run of `benchmarks.chaos`: its model, data and config, the trainer's process, and detection of hangs."""

import asyncio
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from benchmarks.common.random_model import save_random_qwen3, save_word_tokenizer
from deploy.cluster.process import Process
from deploy.cluster.run_view import JsonlTail
from deploy.local.processes import Deployment

PROMPTS_PER_BATCH = 6
RESPONSES_PER_PROMPT = 4
PROMPT_TOKENS = 12
MAX_RESPONSE_TOKENS = 192
MAX_MODEL_LEN = PROMPT_TOKENS + MAX_RESPONSE_TOKENS
VOCAB_SIZE = 96
"""The EOS token has a probability of about one in so many, so that lengths spread over the whole range."""

MODEL_SIZE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}

POOL_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 6.0
HEARTBEAT_TIMEOUT_S = 3.0
PUBLISH_TIMEOUT_S = 5.0

START_LIMIT_S = 150.0
END_LIMIT_S = 60.0
ITERATION_LIMIT_S = POOL_TIMEOUT_S + 6 * PUBLISH_TIMEOUT_S + 5 * REQUEST_TIMEOUT_S
"""The pool's full waiting time without an instance, a publish whose every step times out, and requests that are moved
several times: an iteration that takes longer counts as a hang."""

POLL_S = 0.1

REWARD = """
def early_words(prompt, responses, row):
    return [sum(int(word[1:]) < 16 for word in r.text.split()) / max(len(r.text.split()), 1) for r in responses]
"""

CONFIG = """
[run]
dir = "{run_dir}"
seed = {seed}
[model]
path = "{directory}/model"
[prompts]
source = "{directory}/rows.jsonl"
prompts_per_batch = {prompts}
max_prompt_tokens = {prompt_tokens}
chat_template = false
[rollout]
responses_per_prompt = {responses}
max_response_tokens = {response_tokens}
[reward]
name = "python:{directory}/reward.py:early_words"
[pool]
fleet_port = {port}
join = "now"
timeout_s = {pool_timeout_s}
request_timeout_s = {request_timeout_s}
heartbeat_timeout_s = {heartbeat_timeout_s}
max_outstanding_tokens = {max_outstanding_tokens}
split_tail = true
stream_interval = 4
[publish]
timeout_s = {publish_timeout_s}
snapshot_dir = "{directory}/snapshots"
[optimizer]
learning_rate = 1e-3
[train]
iterations = {iterations}
order = "prompt"
[checkpoint]
every = 0
"""


def make_inputs(directory: Path, iterations: int) -> None:
    """A random model, a tokenizer of one token per word `w<i>`, prompts for every iteration, and a reward."""
    transformers_logging.disable_progress_bar()
    save_random_qwen3(directory / "model", **MODEL_SIZE)
    save_word_tokenizer(directory / "model", VOCAB_SIZE)
    rows = torch.randint(2, VOCAB_SIZE, (iterations * PROMPTS_PER_BATCH, PROMPT_TOKENS)).tolist()
    lines = (json.dumps({"prompt": " ".join(f"w{i}" for i in row)}) + "\n" for row in rows)
    (directory / "rows.jsonl").write_text("".join(lines))
    (directory / "reward.py").write_text(REWARD)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a run; `times_s` are the times at which iterations were complete, by `time.monotonic()`."""

    proofs: list[dict[str, Any]]
    records: list[dict[str, Any]]
    times_s: list[float]
    num_hangs: int
    exit_code: int | None
    last_lines: list[str]
    seconds: float
    model_file: Path


class TrainerRun:
    """The trainer of one run, as a deployment starts it; its instances are managed elsewhere."""

    def __init__(self, directory: Path, name: str, iterations: int, seed: int, port: int) -> None:
        self.dir = directory / name
        self.dir.mkdir()
        self._config = directory / f"{name}.toml"
        self._config.write_text(
            CONFIG.format(
                directory=directory,
                run_dir=self.dir,
                seed=seed,
                port=port,
                iterations=iterations,
                prompts=PROMPTS_PER_BATCH,
                responses=RESPONSES_PER_PROMPT,
                prompt_tokens=PROMPT_TOKENS,
                response_tokens=MAX_RESPONSE_TOKENS,
                pool_timeout_s=POOL_TIMEOUT_S,
                request_timeout_s=REQUEST_TIMEOUT_S,
                heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
                max_outstanding_tokens=2 * RESPONSES_PER_PROMPT * MAX_MODEL_LEN,
                publish_timeout_s=PUBLISH_TIMEOUT_S,
            )
        )
        self._iterations = iterations
        self._times_s: list[float] = []
        self._num_hangs = 0

    @property
    def num_done(self) -> int:
        return len(self._times_s)

    @property
    def progress(self) -> float:
        return self.num_done / self._iterations

    async def finish(self) -> Outcome:
        """Runs the trainer until it exits; a hanging trainer is ended."""
        started = time.monotonic()
        with Deployment() as deployment:
            running = deployment.start(self._process())
            records = JsonlTail(self.dir / "metrics.jsonl")
            since_s = started
            while running.exit_code() is None:
                await asyncio.sleep(POLL_S)
                for _ in records.read_new():
                    since_s = time.monotonic()
                    self._times_s.append(since_s)
                if time.monotonic() - since_s > self._limit_s():
                    self._num_hangs += 1
                    break
            exit_code = running.exit_code()
            last_lines = running.last_lines()
        self._times_s += [time.monotonic() for _ in records.read_new()]
        return Outcome(
            _lines(self.dir / "ledger.jsonl"),
            _lines(self.dir / "metrics.jsonl"),
            self._times_s,
            self._num_hangs,
            exit_code,
            last_lines,
            time.monotonic() - started,
            self.dir / "model" / "model.safetensors",
        )

    def _limit_s(self) -> float:
        if self.num_done == self._iterations:
            return END_LIMIT_S
        return ITERATION_LIMIT_S if self._times_s else START_LIMIT_S

    def _process(self) -> Process:
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        argv += ["--nproc-per-node", "1", "-m", "trainer", str(self._config)]
        env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        return Process("trainer", "trainer", tuple(argv), self.dir / "logs" / "trainer.log", env=env)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
