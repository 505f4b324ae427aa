"""The cost of rollouts, at the producer and for the trainer: the real producer against instances that only send tokens.

    python -m benchmarks.producer --json [--events] [--no-texts]

Producer, pool, client, queue, tokenizer and an asynchronous reward are the real ones; the instances are separate
processes (`benchmarks.producer.mock_instance`). Four cases, each with fresh instances:

- large: all long responses of one batch in flight at once;
- small: many short responses, batch after batch; the cost per response besides its tokens;
- wide: many instances and many replicas, which take their groups from the dock in processes of their own;
- beside training: the main thread runs many small torch operations, as a trainer does, with and without rollouts at the
  rate of a run, alternately.

Instances send frames of arrays, as the embedded engine does; with `--events` vLLM's JSON. `--no-texts` leaves out the
tokenizer's decoding, which takes longer than all else.

The last line is one JSON object:

- `responses_per_s`: short responses per CPU second of this process, the throughput of one core; `cpu_s_per_1000` of
  them, and `wall_responses_per_s`, with the mock instances on the same machine;
- `peak_bytes`: growth of resident memory in the large case, `large_bytes_per_token` of all its tokens, and
  `large_tokens_per_cpu_s`; `longest_block_s`, for which the producer's event loop was at work on one thing;
- `wide_cpu_s` of this process for all short responses, `wide_idle_cpu_share` of a core while nothing is rolled out,
  `wide_longest_block_s` as above, and `wide_least` and `wide_most`, the responses that a replica took;
- `main_thread_slowdown`: median over pairs of (seconds of a training step with rollouts / without) - 1, and
  `tokens_per_s`, the rate of rollouts meanwhile, and `taking_share`, the share of the main thread's time in which it
  takes groups. The producer is a process of its own, as in a run. Time in which the main thread waited for a core is
  subtracted from its steps: it is caused by other programs on the machine.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from async_rl.producer.dock import Docking
from benchmarks.common.local_producer import LocalProducer as Producer
from benchmarks.producer.beside import OwnBatches, producer_elsewhere
from benchmarks.producer.drain import drain_elsewhere
from benchmarks.producer.mock_instance import MAX_CONCURRENCY, Script
from benchmarks.producer.rig import (
    MAX_RESPONSE_TOKENS,
    NUM_PROCESSES,
    VERSION,
    VOCAB_SIZE,
    Lateness,
    RolloutLoad,
    make_batch,
    open_producer,
    waited_for_core_s,
)

BESIDE_TRAINING = (16, 512)
"""Responses to each prompt and mean tokens of each response, in the case beside training."""

BATCH_PROMPTS = 1024

CASES = ("large", "small", "wide", "beside")

AHEAD_TOKENS = 4096
"""That wait at a replica, in the case of many."""


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of the measurements."""

    prompts: int
    responses: int
    tokens: int
    small_responses: int
    prompts_per_s: int
    pairs: int
    window_s: float
    warm_up_s: float
    events: bool
    no_texts: bool
    concurrency: int
    instances: int
    replicas: int
    idle_s: float

    def script(
        self, mean_tokens: int, sigma: float, first_token_s: float, token_s: float, instances: int = NUM_PROCESSES
    ) -> Script:
        """What the instances of each process do."""
        return Script(
            VERSION,
            mean_tokens,
            sigma,
            first_token_s,
            token_s,
            VOCAB_SIZE,
            has_frames=not self.events,
            max_concurrency=self.concurrency,
            ports=instances // NUM_PROCESSES,
        )


def measure_large(directory: Path, size: Size) -> dict[str, float]:
    script = size.script(size.tokens, sigma=0.3, first_token_s=0.2, token_s=0.02)
    with open_producer(directory, script, size.responses, has_texts=not size.no_texts) as producer:
        before, cpu_s = reset_peak_bytes(), time.process_time()
        with Lateness(producer.loop) as lateness:
            num_responses, num_tokens = take_all(producer, iteration=0, num_prompts=size.prompts)
        cpu_s = time.process_time() - cpu_s
        grown = peak_bytes() - before
    return {
        "peak_bytes": grown,
        "large_tokens": num_tokens,
        "large_bytes_per_token": round(grown / num_tokens, 1),
        "large_tokens_per_cpu_s": round(num_tokens / cpu_s),
        "large_responses": num_responses,
        "large_cpu_s": round(cpu_s, 2),
        "longest_block_s": round(lateness.longest_s, 3),
    }


def measure_small(directory: Path, size: Size) -> dict[str, float]:
    script = size.script(10, sigma=0.3, first_token_s=0.05, token_s=0.005)
    num_prompts = -(-size.small_responses // size.responses)
    with open_producer(directory, script, size.responses, has_texts=not size.no_texts) as producer:
        take_all(producer, iteration=0, num_prompts=min(num_prompts, 64))  # connections and caches
        cpu_s, wall_s, count = time.process_time(), time.monotonic(), 0
        for first in range(0, num_prompts, BATCH_PROMPTS):
            batch_size = min(BATCH_PROMPTS, num_prompts - first)
            count += take_all(producer, iteration=1 + first, num_prompts=batch_size)[0]
        cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
    return {
        "responses_per_s": round(count / cpu_s),
        "cpu_s_per_1000": round(1000 * cpu_s / count, 4),
        "wall_responses_per_s": round(count / wall_s),
    }


def measure_wide(directory: Path, size: Size) -> dict[str, float]:
    script = size.script(10, sigma=0.3, first_token_s=0.2, token_s=0.02, instances=size.instances)
    docking = Docking(size.replicas, max_ahead=AHEAD_TOKENS)
    opened = open_producer(
        directory, script, size.responses, has_texts=not size.no_texts, kind=OwnBatches, docking=docking
    )
    with opened as producer:
        time.sleep(size.idle_s / 2)
        cpu_s, began_s = time.process_time(), time.monotonic()
        time.sleep(size.idle_s)
        idle = (time.process_time() - cpu_s) / (time.monotonic() - began_s)
        cpu_s, began_s = time.process_time(), time.monotonic()
        with Lateness(producer.loop) as lateness:
            taken = drain_elsewhere(producer.address, size.replicas, 1, size.prompts)
        cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - began_s
    assert sum(taken) == size.prompts * size.responses, "each response is taken once"
    return {
        "wide_idle_cpu_share": round(idle, 4),
        "wide_cpu_s": round(cpu_s, 2),
        "wide_wall_s": round(wall_s, 2),
        "wide_longest_block_s": round(lateness.longest_s, 3),
        "wide_least": min(taken),
        "wide_most": max(taken),
    }


def measure_beside_training(directory: Path, size: Size, say: Callable[[str], None]) -> dict[str, float]:
    responses, tokens = BESIDE_TRAINING
    script = size.script(tokens, sigma=0.5, first_token_s=0.1, token_s=0.5 / tokens)
    step = training_step()
    slowdowns = []
    num_tokens, wall_s, taking_s = 0, 0.0, 0.0
    opened = producer_elsewhere(directory, script, responses)
    with opened as producer, RolloutLoad(producer.start, size.prompts_per_s) as rollouts:
        timed_steps(step, size.window_s, lambda: None)
        for pair in range(size.pairs):
            alone = timed_steps(step, size.window_s, lambda: None)
            rollouts.begin()
            timed_steps(step, size.warm_up_s, rollouts.keep_going)  # until as many end as begin
            before = rollouts.num_tokens, time.monotonic(), rollouts.taking_s
            beside = timed_steps(step, size.window_s, rollouts.keep_going)
            num_tokens += rollouts.num_tokens - before[0]
            wall_s += time.monotonic() - before[1]
            taking_s += rollouts.taking_s - before[2]
            rollouts.end()
            slowdowns.append(beside / alone - 1)
            say(f"pair {pair + 1}/{size.pairs}: a step takes {1e3 * alone:.3f} ms, {1e3 * beside:.3f} ms beside them")
    return {
        "main_thread_slowdown": round(statistics.median(slowdowns), 4),
        "tokens_per_s": round(num_tokens / wall_s),
        "taking_share": round(taking_s / wall_s, 4),
    }


def take_all(producer: Producer, iteration: int, num_prompts: int) -> tuple[int, int]:
    """Rolls out a batch and discards its groups as they finish; returns the numbers of responses and tokens."""
    num_responses = num_tokens = 0
    with producer.start(make_batch(iteration, num_prompts), VERSION) as run:
        while groups := run.ready(wait=True):
            num_responses += sum(len(group.responses) for group in groups)
            num_tokens += sum(group.num_response_tokens for group in groups)
    return num_responses, num_tokens


def training_step() -> Callable[[], None]:
    """Forward, backward and step of a small transformer: a few hundred small torch operations."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    inputs = torch.randn(2, 16, 64)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed_steps(step: Callable[[], None], seconds: float, between: Callable[[], None]) -> float:
    """Mean seconds of a step, over `seconds` of steps; work between steps does not count."""
    end, spent, count = time.monotonic() + seconds, 0.0, 0
    while time.monotonic() < end:
        between()
        begun, waited = time.perf_counter(), waited_for_core_s()
        step()
        spent += time.perf_counter() - begun - (waited_for_core_s() - waited)
        count += 1
    return spent / count


def reset_peak_bytes() -> int:
    """Resets the peak; returns the resident bytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    return _status_bytes("VmHWM")


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def measure(size: Size, cases: Mapping[str, bool], say: Callable[[str], None]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        results: dict[str, Any] = {}
        if cases["large"]:
            results |= measure_large(directory, size)
            say(f"large: {results}")
        if cases["small"]:
            results |= measure_small(directory, size)
            say(f"small: {results}")
        if cases["wide"]:
            results |= measure_wide(directory, size)
            say(f"wide: {results}")
        if cases["beside"]:
            results |= measure_beside_training(directory, size, say)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.producer", description="What rollouts cost.")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--prompts", type=int, default=1024, help="of the large and wide cases (default: %(default)s)")
    parser.add_argument("--responses", type=int, default=16, help="of each prompt (default: %(default)s)")
    parser.add_argument(
        "--tokens",
        type=int,
        default=2048,
        help=f"mean of the large case, under {MAX_RESPONSE_TOKENS} (default: %(default)s)",
    )
    parser.add_argument("--small-responses", type=int, default=100_000, help="(default: %(default)s)")
    parser.add_argument(
        "--prompts-per-s",
        type=int,
        default=4,
        help="beside training; {} responses of {} tokens each (default: %(default)s)".format(*BESIDE_TRAINING),
    )
    parser.add_argument("--pairs", type=int, default=5, help="with and without rollouts (default: %(default)s)")
    parser.add_argument("--window-s", type=float, default=3.0, help="of each half of a pair (default: %(default)s)")
    parser.add_argument(
        "--warm-up-s", type=float, default=2.0, help="rollouts before the half with them (default: %(default)s)"
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        default=MAX_CONCURRENCY,
        help="responses at once that instances report (default: all)",
    )
    parser.add_argument("--instances", type=int, default=100, help="of the wide case (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=8, help="of the wide case (default: %(default)s)")
    parser.add_argument("--idle-s", type=float, default=20.0, help="watched in the wide case (default: %(default)s)")
    parser.add_argument("--events", action="store_true", help="instances send events of JSON, as vLLM does")
    parser.add_argument("--no-texts", action="store_true", help="responses are not decoded")
    options = parser.parse_args()
    size = Size(**{field.name: getattr(options, field.name) for field in fields(Size)})
    say: Callable[[str], None] = (lambda line: None) if options.json else print
    print(json.dumps(measure(size, {case: case in options.cases for case in CASES}, say)))


if __name__ == "__main__":
    main()
