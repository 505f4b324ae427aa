"""One run of `benchmarks.chaos`: its model, data and config, the trainer's process, and detection of hangs."""

import asyncio
import json
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers.utils import logging as transformers_logging

from async_rl.records.run_records import RecordFile
from benchmarks.chaos.rollouts import CHAT_TEMPLATE, MAX_RESPONSE_TOKENS, PROMPT_TOKENS, RolloutKind
from benchmarks.common.random_model import save_random_qwen3, save_word_tokenizer
from deploy.cluster.process import Process, Running
from deploy.local.processes import Deployment

PROMPTS_PER_BATCH = 6
RESPONSES_PER_PROMPT = 4
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
PUBLISH_TIMEOUT_S = 5.0

START_LIMIT_S = 150.0
END_LIMIT_S = 60.0
ITERATION_LIMIT_S = POOL_TIMEOUT_S + 6 * PUBLISH_TIMEOUT_S
TURN_LIMIT_S = 5 * REQUEST_TIMEOUT_S
"""The pool's full waiting time without an instance, a publish whose every step times out, and for each turn a request
that is moved several times: an iteration that takes longer counts as a hang."""

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
chat_template = {chat}
[rollout]
program = "{program}"
responses_per_prompt = {responses}
max_response_tokens = {response_tokens}
{settings}[reward]
name = "python:{directory}/reward.py:early_words"
[pool]
fleet_address = "127.0.0.1:{port}"
timeout_s = {pool_timeout_s}
request_timeout_s = {request_timeout_s}
[publish]
timeout_s = {publish_timeout_s}
snapshot_dir = "{directory}/snapshots"
[optimizer]
learning_rate = {learning_rate}
[adapter]
{adapter}
[train]
iterations = {iterations}
order = "prompt"
[checkpoint]
every = {checkpoint_every}
"""

CHECKPOINT_EVERY = 2

ADAPTER = "rank = 4"
LEARNING_RATES = {False: 1e-3, True: 1e-2}
"""Of all weights, and of adapters."""

PRODUCER = "async_rl.producer"
"""A word of the command line of the run's producer."""


def make_inputs(directory: Path, iterations: int) -> None:
    """A random model, a tokenizer of one token per word `w<i>`, prompts for every iteration, and a reward."""
    transformers_logging.disable_progress_bar()
    save_random_qwen3(directory / "model", **MODEL_SIZE)
    save_word_tokenizer(directory / "model", VOCAB_SIZE, CHAT_TEMPLATE)
    rows = torch.randint(2, VOCAB_SIZE, (iterations * PROMPTS_PER_BATCH, PROMPT_TOKENS)).tolist()
    lines = (json.dumps({"prompt": " ".join(f"w{i}" for i in row)}) + "\n" for row in rows)
    (directory / "rows.jsonl").write_text("".join(lines))
    (directory / "reward.py").write_text(REWARD)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a run; `rollouts` are the records of its program's, if it has one.

    `times_s` are the times at which iterations were complete first, by `time.monotonic()`.
    """

    proofs: list[dict[str, Any]]
    records: list[dict[str, Any]]
    rollouts: list[dict[str, Any]]
    times_s: list[float]
    num_hangs: int
    exit_code: int | None
    last_lines: list[str]
    seconds: float
    model_file: Path


class TrainerRun:
    """The trainer of one run, as a deployment starts it; its instances are managed elsewhere."""

    def __init__(
        self,
        directory: Path,
        name: str,
        rollouts: RolloutKind,
        iterations: int,
        seed: int,
        port: int,
        *,
        is_killed: bool,
        has_adapters: bool,
    ) -> None:
        """`is_killed`: it saves checkpoints, from which it resumes after `kill`. `has_adapters`: it trains these."""
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
                adapter=ADAPTER if has_adapters else "",
                learning_rate=LEARNING_RATES[has_adapters],
                prompts=PROMPTS_PER_BATCH,
                program=rollouts.program,
                settings=rollouts.settings,
                chat=json.dumps(rollouts.chat),
                checkpoint_every=CHECKPOINT_EVERY if is_killed else 0,
                responses=RESPONSES_PER_PROMPT,
                prompt_tokens=PROMPT_TOKENS + (2 if rollouts.chat else 0),
                response_tokens=MAX_RESPONSE_TOKENS,
                pool_timeout_s=POOL_TIMEOUT_S,
                request_timeout_s=REQUEST_TIMEOUT_S,
                publish_timeout_s=PUBLISH_TIMEOUT_S,
            )
        )
        self._iterations = iterations
        self._limit_s = ITERATION_LIMIT_S + rollouts.max_turns * TURN_LIMIT_S
        self._times_s: list[float] = []
        self._num_hangs = 0
        self._running: Running | None = None
        self._is_killed = False

    @property
    def num_done(self) -> int:
        return len(self._times_s)

    @property
    def progress(self) -> float:
        return self.num_done / self._iterations

    async def finish(self) -> Outcome:
        """Runs the trainer until it exits, again each time it was killed; a hanging trainer is ended."""
        started_s = time.monotonic()
        records = RecordFile(self.dir / "metrics.jsonl")
        with Deployment() as deployment:
            while True:
                self._is_killed = False
                running = self._running = deployment.start(self._process())
                await self._watch(running, records)
                if not self._is_killed or running.exit_code() == 0:
                    break
            self._running = None
            exit_code = running.exit_code()
            last_lines = running.last_lines()
        self._note(records)
        ledger, metrics, rollouts = (
            RecordFile(self.dir / f"{name}.jsonl") for name in ("ledger", "metrics", "rollouts")
        )
        return Outcome(
            list(ledger.new_records()),
            list(metrics.new_records()),
            list(rollouts.new_records()),
            self._times_s,
            self._num_hangs,
            exit_code,
            last_lines,
            time.monotonic() - started_s,
            self.dir / "model" / "model.safetensors",
        )

    def kill(self) -> None:
        """Ends the trainer as a lost machine would; `finish` starts it again."""
        self._is_killed = True
        self._kill("torch.distributed.run", "async_rl.trainer")

    def kill_producer(self) -> None:
        """The trainer starts it again, and goes on; one that ends counts as failed."""
        self._kill(PRODUCER)

    def processes(self, word: str) -> list[psutil.Process]:
        """Those of the trainer whose command lines have this word."""
        found = []
        with suppress(psutil.NoSuchProcess):
            descendants = psutil.Process(self._running.pid).children(recursive=True) if self._running else ()
            for process in descendants:
                with suppress(psutil.NoSuchProcess):
                    if word in process.cmdline():
                        found.append(process)
        return found

    def _kill(self, *words: str) -> None:
        for process in [process for each in words for process in self.processes(each)]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)

    async def _watch(self, running: Running, records: RecordFile) -> None:
        """Until the trainer exits or hangs."""
        since_s, limit_s = time.monotonic(), START_LIMIT_S
        while running.exit_code() is None:
            await asyncio.sleep(POLL_S)
            if self._note(records):
                since_s, limit_s = time.monotonic(), self._limit_s
            if self.num_done == self._iterations:
                limit_s = END_LIMIT_S
            if time.monotonic() - since_s > limit_s:
                self._num_hangs += 1
                return

    def _note(self, records: RecordFile) -> bool:
        """Notes the iterations that were completed, each for the first time; whether a line was written."""
        new = list(records.new_records())
        self._times_s += [time.monotonic() for record in new if record["iteration"] >= self.num_done]
        return bool(new)

    def _process(self) -> Process:
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        argv += ["--nproc-per-node", "1", "-m", "async_rl.trainer", str(self._config), "--run.resume", "true"]
        env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        return Process("trainer", "trainer", tuple(argv), self.dir / "logs" / "trainer.log", env=env)
