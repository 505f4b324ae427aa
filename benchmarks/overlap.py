"""The benefit of the period: the same batches trained synchronously and periodically, alternately, on real parts.

    python -m benchmarks.overlap --json [--pairs N]

One instance of the embedded engine is pinned to one core, the Megatron trainer to another. Each prompt has its own
response length, drawn from a long-tailed distribution and forced on the instance: both modes do the same work.

Overlap helps most if generation and training take the same time, and which of them is faster differs between machines.
So the benchmark balances them first: it trains a batch synchronously a few times and chooses how many responses the
instance gets at once, which determines the cost per token. The last line is one JSON object:

- `responses_at_once`: the number chosen; `balance`: median of generation / training in the synchronous runs that count;
- `ideal_speedup`: median of (generation + training) / the longer of the two, which no overlap can exceed;
- `sync_s`, `periodic_s`: medians of the seconds of an iteration, from publish to step;
- `speedup`: median over pairs of sync / periodic;
- `bound_s`: median of max(generation span, time to first group + training time) + publish + step of the periodic runs,
  which no schedule of the same work on the same two cores can beat;
- `overlap_efficiency`: median of bound / periodic, each from the same iteration;
- `generation_slowdown`, `training_slowdown`: medians over pairs of periodic / synchronous seconds of the same work.
  Both sides share caches, memory and a host, and the trainer's process also receives and rewards the responses: what
  this costs is in `bound_s`, too.
"""

import argparse
import asyncio
import json
import logging
import math
import os
import queue
import random
import secrets
import statistics
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from async_rl.config.file import parse_config
from async_rl.config.pool_section import PoolSection
from async_rl.config.sections import Config
from async_rl.method.types import Batch, Response
from async_rl.producer.dock import Docking
from async_rl.producer.process import Given, ProducerAddress
from async_rl.producer.program import serve
from async_rl.rollouts.data.prompts import PromptSource
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.shared.protocol.inference import SamplingParams
from benchmarks.common.iteration import bound, run_iteration
from benchmarks.common.random_model import save_random_qwen3, save_word_tokenizer
from benchmarks.common.running_instance import running_instance
from trainer.devices import choose_device
from trainer.parallel import init_parallel
from trainer.session import Session, open_session

RESPONSES_PER_PROMPT = 8
PROMPT_TOKENS = 48
MEDIAN_RESPONSE_TOKENS = 24
MAX_RESPONSE_TOKENS = 160
VOCAB_SIZE = 1024

FIRST_RESPONSES = 64
MAX_RESPONSES = 256
"""Maximum number of responses at the instance at once; its cache has space for that many."""
PIECE = 2
"""Responses of one request where less than `MANY_RESPONSES` are at the instance at once, else those of a group.

The pace is a multiple of it: with whole groups only, the smallest paces would be too far apart to balance anything.
"""
MANY_RESPONSES = 64
MAX_CALIBRATIONS = 6
BALANCED = 0.05
"""|log(generation / training)| below which another attempt would only follow the machine's noise."""
SLOPES = (0.3, 1.0)
"""Least and largest -d log(generation / training) / d log(responses at once) that a next attempt is derived from."""
MODEL_SIZE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


class Pace:
    """The number of responses the instance gets at once, and the mode; to be set between iterations."""

    def __init__(self) -> None:
        self.docking = Docking()
        self.set(MAX_RESPONSES)

    def wait(self, mode: str) -> None:
        """A run has one mode, which the producer knows when it starts; here the same one takes turns."""
        object.__setattr__(self.docking, "holds", mode == "synchronous")

    def set(self, responses_at_once: int) -> None:
        self.piece = PIECE if responses_at_once < MANY_RESPONSES else RESPONSES_PER_PROMPT
        self.slots = asyncio.Semaphore(responses_at_once // self.piece)


class PacedProducer:
    """The producer with a paced pool, in a thread of this process."""

    def __init__(self, pace: "Pace", config: Config, lease_name: str, host: str) -> None:
        self._given = Given(config.model_dump_json(), secrets.token_hex(), lease_name, host)
        self._ports: queue.SimpleQueue[int] = queue.SimpleQueue()
        pool = PacedPool(pace, config.pool)
        # The producer's own, which it makes in this process.
        self._docking = patch.object(Docking, "of", return_value=pace.docking)
        self._docking.start()
        self._thread = threading.Thread(target=serve, args=(self._given, self._ports.put, pool))
        self._thread.start()

    def address(self, watch: Callable[[], None]) -> ProducerAddress:
        return ProducerAddress(self._given.host, self._ports.get(), self._given.secret)

    def end(self, timeout_s: float) -> None:
        """It ends with the main rank's connection."""
        self._thread.join(timeout_s)
        self._docking.stop()


class PacedPool(InferencePool):
    """Forces each prompt's responses to a length derived from its tokens, regardless of where the model would stop."""

    def __init__(self, pace: Pace, config: PoolSection) -> None:
        super().__init__(config)
        self._pace = pace

    async def generate_group(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, request_id: str, *arguments: Any
    ) -> tuple[list[Response], int]:
        length = response_tokens(prompt_token_ids)
        fixed = {"max_tokens": length, "min_tokens": length, "ignore_eos": True, "n": self._pace.piece}
        assert sampling.seed is not None

        async def generate(seed: int) -> tuple[list[Response], int]:
            piece = sampling.model_copy(update={**fixed, "seed": seed})
            async with self._pace.slots:
                return await super(PacedPool, self).generate_group(
                    prompt_token_ids, piece, f"{request_id}-{seed}", *arguments
                )

        seeds = range(sampling.seed, sampling.seed + sampling.n, self._pace.piece)
        pieces = await asyncio.gather(*map(generate, seeds))
        return [response for responses, _ in pieces for response in responses], max(tries for _, tries in pieces)


class OneBatch:
    """A prompt source whose every iteration is batch `number` of `source`."""

    def __init__(self, source: PromptSource, number: int) -> None:
        self._source = source
        self._number = number

    def batch(self, iteration: int) -> Batch:
        return Batch(iteration, self._source.batch(self._number).prompts)


def response_tokens(prompt_token_ids: Sequence[int]) -> int:
    """A length from a long-tailed (log-normal, sigma 0.8) distribution, a function of the prompt."""
    draw = random.Random(zlib.crc32(repr(list(prompt_token_ids)).encode()))
    return max(4, min(MAX_RESPONSE_TOKENS, round(draw.lognormvariate(0, 0.8) * MEDIAN_RESPONSE_TOKENS)))


def make_rows(path: Path, number: int) -> None:
    draw = random.Random(1)
    rows = (" ".join(f"w{draw.randrange(2, VOCAB_SIZE)}" for _ in range(PROMPT_TOKENS)) for _ in range(number))
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))


def make_config(directory: Path, url: str, pairs: int, num_prompts: int) -> Config:
    reward = directory / "reward.py"
    reward.write_text(
        "def length_of_text(prompt, responses, row):\n    return [float(len(r.text) % 7) for r in responses]\n"
    )
    return parse_config(
        {
            "run": {"dir": str(directory / "run")},
            "model": {"path": str(directory / "model")},
            "prompts": {
                "source": str(directory / "rows.jsonl"),
                "prompts_per_batch": num_prompts,
                "chat_template": False,
            },
            "rollout": {
                "responses_per_prompt": RESPONSES_PER_PROMPT,
                "max_response_tokens": MAX_RESPONSE_TOKENS,
            },
            "reward": {"name": f"python:{reward}:length_of_text"},
            "pool": {"instances": [url]},
            "algorithm": {"kl_coef": 0.05},
            "optimizer": {"learning_rate": 1e-6},
            "train": {"iterations": pairs},
        },
        source="benchmarks.overlap",
    )


def run_once(session: Session, config: Config, pace: Pace, mode: str, number: int) -> dict[str, Any]:
    """One iteration on batch `number`."""
    pace.wait(mode)
    return run_iteration(session, config, OneBatch(session.prompts, number))


def balance(record: dict[str, Any]) -> float:
    """Generation time / training time of a synchronous iteration."""
    return float(record["rollout_s"] / record["train_s"])


def calibrate(measure_at: Callable[[int], float], say: Callable[[str], None]) -> int:
    """The number of responses at once that brings generation / training nearest to 1.

    Args:
        measure_at: runs a synchronous iteration with that many responses at once; returns generation / training.
    """
    measured: dict[int, float] = {}
    responses = FIRST_RESPONSES
    while responses not in measured and len(measured) < MAX_CALIBRATIONS:
        measured[responses] = measure_at(responses)
        say(f"calibration: {responses} responses at once, generation / training = {measured[responses]:.2f}")
        if abs(math.log(measured[responses])) < BALANCED:
            break
        responses = next_attempt(list(measured.items()))
    return min(measured, key=lambda responses: abs(math.log(measured[responses])))


def next_attempt(measured: Sequence[tuple[int, float]]) -> int:
    """The number of responses at which the line through the last two measurements, on log scales, meets 1."""
    last, ratio = measured[-1]
    # A decoding step costs nearly the same for more sequences, until the core is saturated.
    slope = SLOPES[1]
    if len(measured) > 1:
        before, ratio_before = measured[-2]
        found = math.log(ratio_before / ratio) / math.log(last / before)
        # More responses never cost more, but beside other programs they may seem to.
        slope = min(max(found, SLOPES[0]), SLOPES[1]) if found > 0 else SLOPES[1]
    wanted: float = last * ratio ** (1 / slope)
    step = PIECE if wanted < MANY_RESPONSES else RESPONSES_PER_PROMPT
    return max(step, min(MAX_RESPONSES, step * round(wanted / step)))


def measure(pairs: int, num_prompts: int, responses_at_once: int | None, say: Callable[[str], None]) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_random_qwen3(directory / "model", **MODEL_SIZE)
        save_word_tokenizer(directory / "model", VOCAB_SIZE)
        make_rows(directory / "rows.jsonl", num_prompts * (pairs + 1))
        room: tuple[str, ...] = ("--max-model-len", str(PROMPT_TOKENS + MAX_RESPONSE_TOKENS))
        room += ("--max-concurrency", str(MAX_RESPONSES))
        with running_instance(directory / "model", *room, core=cores[0]) as url:
            os.sched_setaffinity(0, {cores[-1]})
            torch.set_num_threads(1)
            config = make_config(directory, url, pairs, num_prompts)
            parallel = init_parallel(choose_device("cpu"), 0, config.trainer)
            pace = Pace()
            with open_session(config, parallel, start=partial(PacedProducer, pace)) as session:
                run_once(session, config, pace, "periodic", pairs)  # compiles, allocates and connects

                def measure_at(responses: int) -> float:
                    pace.set(responses)
                    return balance(run_once(session, config, pace, "synchronous", pairs))

                chosen = responses_at_once or calibrate(measure_at, say)
                pace.set(chosen)
                runs = list(run_pairs(session, config, pace, pairs, say))
            parallel.close()
    return {"responses_at_once": chosen, **summarize(runs)}


def run_pairs(
    session: Session, config: Config, pace: Pace, pairs: int, say: Callable[[str], None]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(synchronous, periodic) records of each batch; which mode comes first alternates."""
    for number in range(pairs):
        modes = ("synchronous", "periodic") if number % 2 == 0 else ("periodic", "synchronous")
        records = {mode: run_once(session, config, pace, mode, number) for mode in modes}
        sync, periodic = records["synchronous"], records["periodic"]
        assert sync["total_s"] >= sync["rollout_s"] + sync["train_s"], "synchronous training waits for all rollouts"
        say(
            f"pair {number + 1}/{pairs}: synchronous {sync['total_s']:.2f} s "
            f"(rollout {sync['rollout_s']:.2f}, train {sync['train_s']:.2f}, publish {sync['publish_s']:.2f}), "
            f"periodic {periodic['total_s']:.2f} s (rollout {periodic['rollout_s']:.2f}, first group "
            f"{periodic['first_group_s']:.2f}, train {periodic['train_s']:.2f}, bound {bound(periodic):.2f})"
        )
        yield sync, periodic


def ideal_speedup(record: dict[str, Any]) -> float:
    parts = record["rollout_s"], record["train_s"]
    return float(sum(parts) / max(parts))


def slowdown(runs: Sequence[tuple[dict[str, Any], dict[str, Any]]], part: str) -> float:
    return float(statistics.median(periodic[part] / sync[part] for sync, periodic in runs))


def summarize(runs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    median = statistics.median
    return {
        "pairs": len(runs),
        "sync_s": round(median(sync["total_s"] for sync, _ in runs), 4),
        "periodic_s": round(median(periodic["total_s"] for _, periodic in runs), 4),
        "speedup": round(median(sync["total_s"] / periodic["total_s"] for sync, periodic in runs), 4),
        "balance": round(median(balance(sync) for sync, _ in runs), 4),
        "ideal_speedup": round(median(ideal_speedup(sync) for sync, _ in runs), 4),
        "bound_s": round(median(bound(periodic) for _, periodic in runs), 4),
        "overlap_efficiency": round(median(bound(periodic) / periodic["total_s"] for _, periodic in runs), 4),
        "generation_slowdown": round(slowdown(runs, "rollout_s"), 4),
        "training_slowdown": round(slowdown(runs, "train_s"), 4),
        "generation_s": round(median(sync["rollout_s"] for sync, _ in runs), 4),
        "training_s": round(median(sync["train_s"] for sync, _ in runs), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description="Synchronous against periodic.")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--pairs", type=int, default=5, help="batches, each run in both modes (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=96, help="of one batch (default: %(default)s)")
    parser.add_argument("--responses-at-once", type=int, help="at the instance; by default what balances both sides")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    say: Callable[[str], None] = (lambda line: None) if options.json else print
    print(json.dumps(measure(options.pairs, options.prompts, options.responses_at_once, say)))


if __name__ == "__main__":
    main()
