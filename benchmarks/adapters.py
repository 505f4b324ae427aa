"""Adapters against all weights: bytes and time of a publish, memory of a training rank, time of a step.

    python -m benchmarks.adapters --json [--size 135M] [--rank 16] [--repeats N]

"135M" has the sizes of SmolLM2-135M, with random weights in float32. A publish goes to one instance of the embedded
engine over loopback: adapters alone, then all weights, each beside a bare gloo broadcast of the bytes of all weights.
Steps are those of training ranks in processes of their own, in turn, on the same groups. The last line is one JSON
object:

- `adapter_mb`, `whole_mb`: what a publish sends; `share` is their ratio;
- `adapters_s`, `whole_s`, `bare_s`: median seconds of a publish of each form, and of the bare broadcast;
- `peak_mb_adapters`, `peak_mb_full`: peak of resident memory of a training rank (VmHWM);
- `gflop_adapters`, `gflop_full`: floating-point operations of the products of a step, counted;
- `step_s_adapters`, `step_s_full`: median seconds of accumulating the groups and an optimizer step.
"""

import argparse
import json
import logging
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch.utils.flop_counter import FlopCounterMode

from async_rl.config.adapter_section import AdapterSection
from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.pool_section import PoolSection, PublishSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.config.sections import ModelSection
from async_rl.config.train_section import OptimizerSection, TrainSection
from async_rl.config.trainer_section import TrainerSection
from async_rl.method.token_arrays import Logprobs, TokenIds
from async_rl.method.types import Group, Prompt, Response
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.publish.publisher import Publisher
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.protocol.inference import AdapterInfo
from async_rl.shared.weights.fingerprint import base_digest
from async_rl.shared.weights.messages import BUCKET_BYTES
from async_rl.shared.weights.sender import AdapterSource, WeightSender, WeightSource
from benchmarks.common.bare_broadcast import TIMEOUT_S, BareBroadcast
from benchmarks.common.random_model import SIZES, save_random_qwen3
from benchmarks.common.running_instance import running_instance
from trainer.devices import choose_device
from trainer.parallel import Parallel, init_parallel
from trainer.trainer import MegatronTrainer

INSTANCE = ("--max-model-len", "128", "--max-concurrency", "4")
PROMPT_TOKENS, RESPONSE_TOKENS, NUM_RESPONSES, NUM_GROUPS = 32, 32, 4, 2
MB = 1e6


def make_trainer(checkpoint: str, rank: int | None, parallel: Parallel) -> MegatronTrainer:
    """Trains adapters of this rank, or all weights."""
    return MegatronTrainer(
        parallel,
        TrainerSection(),
        ModelSection(path=checkpoint),
        RolloutSection(),
        AlgorithmSection(),
        OptimizerSection(),
        TrainSection(iterations=100),
        AdapterSection() if rank is None else AdapterSection(rank=rank),
        publishes_adapters=rank is not None,
    )


def make_groups(vocab_size: int) -> list[Group]:
    draw = random.Random(0)

    def tokens(count: int) -> TokenIds:
        return TokenIds(draw.randrange(vocab_size) for _ in range(count))

    def response() -> Response:
        return Response(
            token_ids=tokens(RESPONSE_TOKENS),
            logprobs=Logprobs([-8.0] * RESPONSE_TOKENS),
            text="",
            finish_reason="length",
            weight_spans=(),
            instance="",
        )

    return [
        Group(
            iteration=0,
            index=i,
            prompt=Prompt(str(i), tokens(PROMPT_TOKENS), {}),
            responses=tuple(response() for _ in range(NUM_RESPONSES)),
            rewards=tuple(float(j % 2) for j in range(NUM_RESPONSES)),
            weight_version="v",
            started_s=0.0,
            finished_s=0.0,
        )
        for i in range(NUM_GROUPS)
    ]


def train(checkpoint: str, rank: int | None, size: str, repeats: int) -> dict[str, float]:
    """In a process of its own: the figures of a training rank."""
    torch.set_num_threads(1)
    parallel = init_parallel(choose_device("cpu"), 0, TrainerSection())
    trainer, window, seconds = make_trainer(checkpoint, rank, parallel), [make_groups(SIZES[size]["vocab_size"])], []

    def step() -> None:
        trainer.accumulate(window)
        trainer.optimizer_step()

    def of_onednn(x_shape: Sequence[int], weight_shape: Sequence[int], *_: Any, **__: Any) -> int:
        return 2 * math.prod(x_shape) * weight_shape[0]

    # The first step, which touches its memory for the first time, is counted and not timed.
    by_onednn = {torch.ops.mkldnn._linear_pointwise: of_onednn}
    with FlopCounterMode(display=False, custom_mapping=by_onednn) as counter:
        step()
    for _ in range(repeats):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    parallel.close()
    flop = counter.get_total_flops()
    return {"step_s": statistics.median(seconds), "peak_mb": peak / MB, "gflop": flop / 1e9}


def measure_training(checkpoint: Path, options: argparse.Namespace) -> dict[str, float]:
    """Ranks of both kinds in turn, twice; the medians."""
    found: dict[str, list[float]] = {}
    for kind, rank in (("adapters", options.rank), ("full", None)) * 2:
        words = ["--train", str(checkpoint), "--size", options.size, "--repeats", str(options.repeats)]
        words += ["--rank", str(rank or 0)]
        done = subprocess.run([sys.executable, "-m", __spec__.name, *words], capture_output=True, text=True, check=True)
        for key, value in json.loads(done.stdout.splitlines()[-1]).items():
            found.setdefault(f"{key}_{kind}", []).append(value)
    return {key: round(statistics.median(values), 3) for key, values in found.items()}


def measure_publishes(checkpoint: Path, options: argparse.Namespace) -> dict[str, float]:
    """Publishes of adapters, then of all weights, each between bare broadcasts."""
    parallel = init_parallel(choose_device("cpu"), 0, TrainerSection())
    trainer = make_trainer(str(checkpoint), options.rank, parallel)
    export, alone = trainer.export, trainer.adapter_export
    assert alone is not None, "adapters are published alone here"
    section = AdapterSection(rank=options.rank)
    info = AdapterInfo(rank=options.rank, alpha=section.alpha, base=base_digest(export.stream()))
    adapter = AdapterSource(alone.specs, alone.stream, info)
    answer: dict[str, Any] = {
        "adapter_mb": round(sum(spec.num_bytes for spec in alone.specs) / MB, 1),
        "whole_mb": round(sum(spec.num_bytes for spec in export.specs) / MB, 1),
    }
    answer["share"] = round(answer["adapter_mb"] / answer["whole_mb"], 4)
    bare_s: list[float] = []
    with running_instance(checkpoint, *INSTANCE) as url, ExitStack() as closing:
        bare = BareBroadcast(1, sum(spec.num_bytes for spec in export.specs), BUCKET_BYTES)
        closing.callback(bare.close)
        for form in ("adapters", "whole"):
            source = WeightSource(export.specs, export.stream, adapter=adapter if form == "adapters" else None)
            with ExitStack() as open_:
                publisher = open_publisher(open_, url, source)
                seconds = []
                for number in range(-1, options.repeats):
                    seconds.append(publisher.publish(f"{form}-{number}").seconds)
                    bare_s.append(bare.seconds())
            answer[f"{form}_s"] = round(statistics.median(seconds[1:]), 4)
    parallel.close()
    return answer | {"bare_s": round(statistics.median(bare_s[1:]), 4)}


def open_publisher(closing: ExitStack, url: str, source: WeightSource) -> Publisher:
    loop = EventLoopThread()
    closing.callback(loop.close)
    pool = InferencePool(PoolSection(instances=(url,)))
    closing.callback(lambda: loop.run(pool.close()))
    loop.run(pool.wait_until_ready())
    config = PublishSection(timeout_s=TIMEOUT_S)
    sender = WeightSender(source, config, "benchmark")
    closing.callback(sender.close)
    return Publisher(pool, loop, config, sender, wait_s=TIMEOUT_S)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapters", description="Adapters, and all weights.")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--size", choices=SIZES, default="135M", help="of the model (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="publishes and steps counted (default: %(default)s)")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    if options.train is not None:
        print(json.dumps(train(options.train, options.rank or None, options.size, options.repeats)))
        return
    with tempfile.TemporaryDirectory() as name:
        checkpoint = Path(name)
        size: dict[str, Any] = {"max_position_embeddings": 512, **SIZES[options.size]}
        save_random_qwen3(checkpoint, **size)
        figures = measure_training(checkpoint, options)
        print(json.dumps(measure_publishes(checkpoint, options) | figures))


if __name__ == "__main__":
    main()
