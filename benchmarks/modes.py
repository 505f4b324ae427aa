"""What the modes of a CPU cost: training and generation with the same work in each of them, in turn.

    python -m benchmarks.modes [--modes MODE ...] [--repeats N] [--cases SIZE:P:G:GROUPS ...]

A mode is `float32`, `bfloat16` (`model.dtype`) or `exact` (`train.exact`, in float32). One thread, random Qwen3 models,
responses of 64 tokens. Training is forward and backward of one group as the trainer lays it out, without the optimizer;
generation is `GROUPS` prompts by the embedded engine, in process, all at once. The last line is one JSON object: for
each case median processor milliseconds of each mode, per group and per sampled token, and `ratio.MODE.*`, the median of
first mode / MODE over rounds.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from async_rl.config.trainer_section import TrainerSection
from async_rl.cpu.exact import ROW_MULTIPLE
from async_rl.model_shape import ModelShape
from benchmarks.common.case import RESPONSE_TOKENS, Case
from benchmarks.common.engine_case import generate_in_engine, prompts_of
from benchmarks.common.random_group import random_group
from benchmarks.common.random_model import SIZES, save_random_qwen3
from inference_service.engine.cache_size import plan_cache
from inference_service.engine.kernels import EXACT, FASTEST
from inference_service.engine.model import load_model
from inference_service.engine.transformers_engine import TransformersEngine
from trainer.batching.group_slice import slices_of
from trainer.batching.shared_prompt import MicroBatch, make_micro_batch
from trainer.devices import choose_device
from trainer.model.gpt import SharedPromptGPT, build_model
from trainer.parallel import Parallel, init_parallel

CPU = torch.device("cpu")
MODES = ("float32", "bfloat16", "exact")
DEFAULT = ("2M:80:8:8", "31M:80:8:8", "2M:512:8:4", "31M:512:8:2", "2M:80:1:1", "31M:80:1:1")

Round = list[float]
"""The milliseconds of each mode."""


def dtype_of(mode: str) -> torch.dtype:
    return torch.bfloat16 if mode == "bfloat16" else torch.float32


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


def make_policy(size: str, mode: str, parallel: Parallel) -> SharedPromptGPT:
    device = choose_device("cpu", exact=mode == "exact")
    model = build_model(shape_of(size), dtype_of(mode), replace(parallel, device=device), TrainerSection())
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
    logprobs_N, *_ = policy(batch, 1.0)
    logprobs_N.sum().backward()
    spent_s = time.process_time() - begun_s
    policy.zero_grad()
    return 1000 * spent_s


def measure_training(case: Case, modes: Sequence[str], repeats: int, parallel: Parallel) -> list[Round]:
    group = random_group(case.prompt_tokens, RESPONSE_TOKENS, case.group_size, SIZES[case.size]["vocab_size"])
    policies = [make_policy(case.size, mode, parallel) for mode in modes]
    batches = [make_micro_batch(slices_of([group]), CPU, ROW_MULTIPLE if mode == "exact" else 1) for mode in modes]
    rounds = range(repeats + 1)
    return [[train(policy, batch) for policy, batch in zip(policies, batches, strict=True)] for _ in rounds][1:]


def open_engine(case: Case, mode: str) -> TransformersEngine:
    length = case.prompt_tokens + RESPONSE_TOKENS
    kernels = EXACT if mode == "exact" else FASTEST
    with tempfile.TemporaryDirectory() as directory:
        save_random_qwen3(Path(directory), dtype=torch.float32, max_position_embeddings=length, **SIZES[case.size])
        loaded = load_model(directory, CPU, dtype_of(mode))
    size = plan_cache(loaded.model.config, dtype_of(mode), CPU, case.num_responses, length, kernels.width)
    return TransformersEngine(loaded, size, length, "processed_logprobs", kernels)


async def measure_generation(case: Case, modes: Sequence[str], repeats: int) -> list[Round]:
    engines = [open_engine(case, mode) for mode in modes]
    for engine in engines:
        await engine.start()
    rounds = [
        [await generate_in_engine(engine, case, prompts_of(case, repeat)) for engine in engines]
        for repeat in range(repeats + 1)
    ][1:]
    for engine in engines:
        engine.close()
    return rounds


def summary(name: str, modes: Sequence[str], rounds: Sequence[Round]) -> dict[str, float]:
    found = {f"{mode}.{name}": statistics.median(each[i] for each in rounds) for i, mode in enumerate(modes)}
    for i, mode in enumerate(modes[1:], 1):
        found[f"ratio.{mode}.{name}"] = statistics.median(each[0] / each[i] for each in rounds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.modes", description="What the modes of a CPU cost.")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of every case (default: %(default)s)")
    parser.add_argument("--cases", nargs="+", type=Case.parse, default=[Case.parse(case) for case in DEFAULT])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="by default all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parallel = init_parallel(choose_device("cpu"), 0, TrainerSection())
    modes: list[str] = options.modes
    results: dict[str, float] = {}
    for case in options.cases:
        results |= summary(f"train.{case}", modes, measure_training(case, modes, options.repeats, parallel))
        generated = asyncio.run(measure_generation(case, modes, options.repeats))
        results |= summary(f"generate.{case}", modes, generated)
        print(json.dumps({key: round(value, 3) for key, value in results.items() if key.endswith(str(case))}))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
