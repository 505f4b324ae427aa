"""What bfloat16 gains on a CPU: training and generation with the same work as in float32, in turn.

    python -m benchmarks.bfloat16 [--repeats N] [--cases SIZE:P:G:GROUPS ...]

One thread, random Qwen3 models, responses of 64 tokens. Training is forward and backward of one group as the trainer
lays it out, without the optimizer; generation is `GROUPS` prompts by the
embedded engine, in process, all at once. The last line is one JSON object: for each case median processor milliseconds
of either dtype, per group and per sampled token, and `ratio.*`, the median of float32 / bfloat16 over pairs.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from async_rl.config.sections import TrainerSection
from benchmarks.common.case import RESPONSE_TOKENS, Case
from benchmarks.common.engine_case import generate_in_engine, prompts_of
from benchmarks.common.random_group import random_group
from benchmarks.common.random_model import SIZES, save_random_qwen3
from inference_service.engine.cache_size import plan_cache
from inference_service.engine.model import load_model
from inference_service.engine.transformers_engine import TransformersEngine
from trainer.batching.group_slice import slices_of
from trainer.batching.shared_prompt import MicroBatch, make_micro_batch
from trainer.devices import choose_device
from trainer.model.gpt import SharedPromptGPT, build_model
from trainer.model.shape import ModelShape
from trainer.parallel import Parallel, init_parallel

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
DEFAULT = ("2M:80:8:8", "31M:80:8:8", "2M:512:8:4", "31M:512:8:2", "2M:80:1:1", "31M:80:1:1")

Pair = tuple[float, float]
"""In float32, in bfloat16."""


def shape_of(size: str) -> ModelShape:
    sizes = SIZES[size]
    return ModelShape(
        family="qwen3",
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        ffn_size=sizes["intermediate_size"],
        num_heads=sizes["num_attention_heads"],
        num_kv_heads=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"],
        vocab_size=sizes["vocab_size"],
        norm_eps=1e-6,
        rope_theta=1e6,
        rope_factor=None,
        tied=True,
    )


def make_policy(size: str, dtype: torch.dtype, parallel: Parallel) -> SharedPromptGPT:
    model = build_model(shape_of(size), dtype, parallel, TrainerSection())
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms have one dimension.
            if parameter.dim() == 1:
                parameter.fill_(1)
            else:
                parameter.normal_(std=0.02)
    return model


def train(policy: SharedPromptGPT, batch: MicroBatch) -> float:
    """Processor milliseconds of a group."""
    begun_s = time.process_time()
    logprobs_N, _ = policy(batch, 1.0)
    logprobs_N.sum().backward()
    spent_s = time.process_time() - begun_s
    policy.zero_grad()
    return 1000 * spent_s


def measure_training(case: Case, repeats: int, parallel: Parallel) -> list[Pair]:
    group = random_group(case.prompt_tokens, RESPONSE_TOKENS, case.group_size, SIZES[case.size]["vocab_size"])
    batch = make_micro_batch(slices_of([group]), CPU)
    wide, narrow = (make_policy(case.size, dtype, parallel) for dtype in DTYPES)
    return [(train(wide, batch), train(narrow, batch)) for _ in range(repeats + 1)][1:]


def open_engine(case: Case, dtype: torch.dtype) -> TransformersEngine:
    length = case.prompt_tokens + RESPONSE_TOKENS
    with tempfile.TemporaryDirectory() as directory:
        save_random_qwen3(Path(directory), dtype=torch.float32, max_position_embeddings=length, **SIZES[case.size])
        loaded = load_model(directory, CPU, dtype)
    size = plan_cache(loaded.model.config, dtype, CPU, case.num_responses, length)
    return TransformersEngine(loaded, size, length, "processed_logprobs")


async def measure_generation(case: Case, repeats: int) -> list[Pair]:
    wide, narrow = engines = [open_engine(case, dtype) for dtype in DTYPES]
    for engine in engines:
        await engine.start()
    pairs = [
        (
            await generate_in_engine(wide, case, prompts_of(case, repeat)),
            await generate_in_engine(narrow, case, prompts_of(case, repeat)),
        )
        for repeat in range(repeats + 1)
    ][1:]
    for engine in engines:
        engine.close()
    return pairs


def summary(name: str, pairs: Sequence[Pair]) -> dict[str, float]:
    wide, narrow = zip(*pairs, strict=True)
    return {
        f"float32.{name}": statistics.median(wide),
        f"bfloat16.{name}": statistics.median(narrow),
        f"ratio.{name}": statistics.median(first / second for first, second in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bfloat16", description="bfloat16 against float32.")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of every case (default: %(default)s)")
    parser.add_argument("--cases", nargs="+", type=Case.parse, default=[Case.parse(case) for case in DEFAULT])
    options = parser.parse_args()
    torch.set_num_threads(1)
    parallel = init_parallel(choose_device("cpu"), 0, TrainerSection())
    results: dict[str, float] = {}
    for case in options.cases:
        results |= summary(f"train.{case}", measure_training(case, options.repeats, parallel))
        results |= summary(f"generate.{case}", asyncio.run(measure_generation(case, options.repeats)))
        print(json.dumps({key: round(value, 3) for key, value in results.items() if key.endswith(str(case))}))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
