"""Where the embedded engine spends a token's time: products, attention, the rest of the model, sampling, Python.

    python -m benchmarks.engine_parts --json [--cases SIZE:P:G:GROUPS ...]

The cases are those of `benchmarks.generation`. The last line is one JSON object: for each case `CASE.total`, processor
milliseconds per sampled token, and `CASE.PART` for each part of it: the time in PyTorch's operators of that part, by
its profiler, and `python`, which is what remains. Of several runs it is the one that took least. Operators are timed by
the clock: on a machine that is busy with something else they take longer than they should, and `python` is too small.
"""

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.case import RESPONSE_TOKENS, Case
from benchmarks.common.engine_case import generate_in_engine, prompts_of
from benchmarks.common.random_model import SIZES, save_random_qwen3
from inference_service.engine.cache_size import plan_cache
from inference_service.engine.model import load_model
from inference_service.engine.transformers_engine import TransformersEngine

CPU = torch.device("cpu")
DEFAULT = ("2M:80:8:16", "2M:512:8:16", "31M:80:8:16", "31M:512:8:8")
NUM_RUNS = 3

PARTS = {
    "products": ("mm", "addmm", "linear", "mkldnn", "onednn"),
    "attention": ("_scaled_dot_product", "_flash_attention", "bmm", "baddbmm", "_softmax", "logsumexp"),
    "sampling": ("exponential_", "argmax", "cumsum", "searchsorted", "sort", "topk", "_log_softmax", "uniform_"),
    "copies": ("copy_", "cat", "index", "_index", "gather", "clone", "_to_copy", "scatter", "fill_", "zero", "empty"),
}
"""By the beginning of an operator's name; all others are `elementwise`."""


def part_of(operator: str) -> str:
    name = operator.removeprefix("aten::")
    return next((part for part, starts in PARTS.items() if name.startswith(starts)), "elementwise")


async def measure(case: Case) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        length = case.prompt_tokens + RESPONSE_TOKENS
        save_random_qwen3(Path(directory), dtype=torch.float32, max_position_embeddings=length, **SIZES[case.size])
        loaded = load_model(directory, CPU, torch.float32)
    size = plan_cache(loaded.model.config, torch.float32, CPU, case.num_responses, length)
    engine = TransformersEngine(loaded, size, length, "processed_logprobs")
    await engine.start()
    await generate_in_engine(engine, case, prompts_of(case, 0))
    runs = [await profiled(engine, case, seed) for seed in range(1, NUM_RUNS + 1)]
    engine.close()
    total, parts = min(runs, key=lambda run: run[0])
    return {f"{case}.total": total} | {f"{case}.{part}": spent for part, spent in parts.items()}


async def profiled(engine: TransformersEngine, case: Case, seed: int) -> tuple[float, dict[str, float]]:
    """Milliseconds per token of one run, and of its parts."""
    # The engine's thread is not the one that profiles.
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as profiler:
        total = await generate_in_engine(engine, case, prompts_of(case, seed))
    parts = dict.fromkeys((*PARTS, "elementwise"), 0.0)
    for event in profiler.key_averages():
        parts[part_of(event.key)] += event.self_cpu_time_total / 1000 / case.num_tokens
    parts["python"] = total - sum(parts.values())
    return total, parts


def run(cases: Sequence[Case]) -> dict[str, float]:
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    for case in cases:
        found |= asyncio.run(measure(case))
    return {key: round(value, 4) for key, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine_parts", description="Where the embedded engine spends a token's time."
    )
    parser.add_argument("--json", action="store_true", help="print only the JSON object, which is the only output")
    parser.add_argument(
        "--cases",
        type=Case.parse,
        nargs="+",
        default=[Case.parse(text) for text in DEFAULT],
        metavar="SIZE:P:G:GROUPS",
        help=f"by default {' '.join(DEFAULT)}; SIZE: {', '.join(SIZES)}",
    )
    print(json.dumps(run(parser.parse_args().cases)))


if __name__ == "__main__":
    main()
