"""What a token costs the embedded engine, in turn with transformers' `generate` on the same prompts.

    python -m benchmarks.generation --json [--repeats N] [--cases SIZE:P:G:GROUPS ...]

One thread, float32, random Qwen3 models, `GROUPS` prompts of `P` tokens with `G` responses of 64 tokens each, sampled
at temperature 1. The engine runs in process, all responses at once; `generate` gets them as one batch. The last line is
one JSON object: for each case, `engine.CASE` and `generate.CASE` are median milliseconds of processor time per sampled
token, and `ratio.CASE` is the median of `generate` / `engine` over pairs.
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
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.common.case import RESPONSE_TOKENS, Case
from benchmarks.common.engine_case import generate_in_engine, prompts_of
from benchmarks.common.random_model import SIZES, save_random_qwen3
from inference_service.engine.cache_size import plan_cache
from inference_service.engine.model import load_model
from inference_service.engine.transformers_engine import TransformersEngine

CPU = torch.device("cpu")


DEFAULT = ("2M:80:8:16", "2M:512:8:16", "2M:2048:8:8", "2M:80:1:128", "31M:80:8:16", "31M:512:8:8")


def generate_in_transformers(model: PreTrainedModel, case: Case, prompts: torch.Tensor) -> float:
    """Processor milliseconds per token."""
    ids = prompts.repeat_interleave(case.group_size, 0)
    begun_s = time.process_time()
    with torch.inference_mode():
        answer = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            min_new_tokens=RESPONSE_TOKENS,
            max_new_tokens=RESPONSE_TOKENS,
            pad_token_id=0,
        )
    spent_s = time.process_time() - begun_s
    assert answer.shape == (len(ids), case.prompt_tokens + RESPONSE_TOKENS)
    return 1000 * spent_s / case.num_tokens


async def measure(case: Case, repeats: int) -> dict[str, float]:
    """Each of both once without being counted, then in turn."""
    with tempfile.TemporaryDirectory() as directory:
        length = case.prompt_tokens + RESPONSE_TOKENS
        save_random_qwen3(Path(directory), dtype=torch.float32, max_position_embeddings=length, **SIZES[case.size])
        loaded = load_model(directory, CPU, torch.float32)
        reference: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    size = plan_cache(loaded.model.config, torch.float32, CPU, case.num_responses, length)
    engine = TransformersEngine(loaded, size, length, "processed_logprobs")
    await engine.start()
    pairs = [
        (
            await generate_in_engine(engine, case, prompts_of(case, repeat)),
            generate_in_transformers(reference, case, prompts_of(case, repeat)),
        )
        for repeat in range(repeats + 1)
    ][1:]
    engine.close()
    ours, theirs = zip(*pairs, strict=True)
    return {
        f"engine.{case}": statistics.median(ours),
        f"generate.{case}": statistics.median(theirs),
        f"ratio.{case}": statistics.median(their / our for our, their in pairs),
    }


def run(cases: Sequence[Case], repeats: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    for case in cases:
        found |= asyncio.run(measure(case, repeats))
    return {key: round(value, 4) for key, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.generation", description="What a token costs the embedded engine."
    )
    parser.add_argument("--json", action="store_true", help="print only the JSON object, which is the only output")
    parser.add_argument("--repeats", type=int, default=3, help="pairs that are counted (default: %(default)s)")
    parser.add_argument(
        "--cases",
        type=Case.parse,
        nargs="+",
        default=[Case.parse(text) for text in DEFAULT],
        metavar="SIZE:P:G:GROUPS",
        help=f"by default {' '.join(DEFAULT)}; SIZE: {', '.join(SIZES)}",
    )
    options = parser.parse_args()
    print(json.dumps(run(options.cases, options.repeats)))


if __name__ == "__main__":
    main()
