"""What it saves that a later turn goes to the instance that has the keys and values of the earlier ones.

    python -m benchmarks.turns --json

Two embedded instances in processes of their own, with the real pool and sessions: rollouts of several turns, all at
once, whose tools take a random time. The same rollouts are sampled in turn with the router as it is (`cached`), and
without telling it where the earlier turn was (`anywhere`). The last line is one JSON object, with medians over
`--repeats`; for each of both:

- `home_share`: later turns that the instance of the turn before sampled;
- `computed_share`: prompt tokens whose keys and values were computed, by the instances' own count;
- `cpu_ms_per_token`: processor time of the instances per sampled token;

and `cpu_ratio`, the median of anywhere / cached over pairs.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil

from async_rl.config.pool_section import PoolSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.pool.inference_pool import InferencePool
from async_rl.pool.router import Cached
from async_rl.protocol.inference import SamplingParams
from async_rl.rollout.rendering import TemplateRenderer
from async_rl.rollout.session import Sessions
from async_rl.token_arrays import TokenIds
from async_rl.types import Prompt, Response, WeightVersion
from benchmarks.common.random_model import SIZES, save_random_qwen3
from benchmarks.common.running_instance import launch, wait_for_url
from benchmarks.producer.rig import make_tokenizer

VERSION = "default"
"""Of the weights that an embedded instance has from its start."""

NUM_INSTANCES = 2
MODEL_LEN = 4096
COUNTERS = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:generation_tokens_total")


class OpenPool(InferencePool):
    """A pool that remembers which instance sampled what; `tells` the router where the earlier turn was, or does not."""

    def __init__(self, config: PoolSection) -> None:
        super().__init__(config)
        self.tells = True
        self.homes: list[bool] = []
        """For each later turn, whether the instance of the earlier one sampled it."""

    async def generate_group(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        version: WeightVersion,
        expected_tokens: float | None = None,
        cached: Cached | None = None,
    ) -> tuple[list[Response], int]:
        told = cached if self.tells else None
        found = await super().generate_group(prompt_token_ids, sampling, request_id, version, expected_tokens, told)
        if cached is not None:
            self.homes.append(found[0][0].instance == cached.url)
        return found


@dataclass(frozen=True, slots=True)
class Load:
    """What the rollouts do."""

    rollouts: int
    group_size: int
    turns: int
    prompt_tokens: int
    turn_tokens: int
    tool_tokens: int
    tool_s: float

    async def run(self, pool: OpenPool, seed: int) -> None:
        limits = RolloutSection(max_turns=self.turns, max_response_tokens=self.turns * 2 * self.turn_tokens)
        tokenizer = make_tokenizer()
        sessions = Sessions(pool, tokenizer, TemplateRenderer(tokenizer), limits)
        await asyncio.gather(*(self._rollout(sessions, seed, number) for number in range(self.rollouts)))

    async def _rollout(self, sessions: Sessions, seed: int, number: int) -> None:
        shared = random.Random(f"{seed}-{number // self.group_size}")
        prompt = Prompt(str(number), TokenIds(shared.choices(range(1, 256), k=self.prompt_tokens)), {})
        own = random.Random(f"{seed}-{number}")
        session = sessions.open(prompt, VERSION, own.randrange(2**32), f"{seed}-{number}", float(self.turn_tokens))
        context = prompt.token_ids
        for _ in range(self.turns):
            num_tokens = own.randint(self.turn_tokens // 2, 3 * self.turn_tokens // 2)
            turn = await session.generate(token_ids=context, max_tokens=num_tokens)
            await asyncio.sleep(own.expovariate(1 / self.tool_s))
            context = context + turn.token_ids + own.choices(range(1, 256), k=self.tool_tokens)
        session.finish()


@dataclass(frozen=True, slots=True)
class Instances:
    urls: tuple[str, ...]
    processes: tuple[psutil.Process, ...]

    def counters(self) -> list[float]:
        """Processor seconds, and `COUNTERS`, of all of them together."""
        times = [process.cpu_times() for process in self.processes]
        found = [sum(each.user + each.system for each in times), *(0.0 for _ in COUNTERS)]
        for url in self.urls:
            with urllib.request.urlopen(f"{url}/metrics") as answer:
                lines = answer.read().decode().splitlines()
            for i, name in enumerate(COUNTERS, start=1):
                found[i] += next(float(line.split()[-1]) for line in lines if line.startswith(name))
        return found


@contextmanager
def open_instances(model: Path) -> Iterator[Instances]:
    with ExitStack() as closing:
        processes = [
            launch("--model", str(model), "--port", "0", "--max-model-len", str(MODEL_LEN))
            for _ in range(NUM_INSTANCES)
        ]
        for process in processes:
            closing.callback(process.wait)
            closing.callback(process.terminate)
        urls = tuple(map(wait_for_url, processes))
        yield Instances(urls, tuple(psutil.Process(process.pid) for process in processes))


async def measure(instances: Instances, load: Load, repeats: int) -> dict[str, float]:
    pool = OpenPool(PoolSection(instances=instances.urls))
    await pool.wait_until_ready()
    await pool.begin_publish()
    await pool.end_publish(VERSION, instances.urls)
    found: dict[str, list[float]] = {}
    try:
        for repeat in range(-1, repeats):
            for name in ("anywhere", "cached"):
                pool.tells = name == "cached"
                before = instances.counters()
                pool.homes.clear()
                # The same rollouts after other prompts, so that nothing of the run before is in the caches.
                await load.run(pool, 2 * repeat + pool.tells)
                spent_s, asked, known, sampled = (b - a for a, b in zip(before, instances.counters(), strict=True))
                if repeat >= 0:
                    found.setdefault(f"{name}.home_share", []).append(statistics.fmean(pool.homes))
                    found.setdefault(f"{name}.computed_share", []).append(1 - known / asked)
                    found.setdefault(f"{name}.cpu_ms_per_token", []).append(1000 * spent_s / sampled)
    finally:
        await pool.close()
    pairs = zip(found["anywhere.cpu_ms_per_token"], found["cached.cpu_ms_per_token"], strict=True)
    found["cpu_ratio"] = [anywhere / cached for anywhere, cached in pairs]
    return {name: round(statistics.median(values), 3) for name, values in found.items()}


def run(size: str, load: Load, repeats: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        shape: dict[str, Any] = {**SIZES[size], "max_position_embeddings": MODEL_LEN}
        save_random_qwen3(Path(directory), **shape)
        with open_instances(Path(directory)) as instances:
            return asyncio.run(measure(instances, load, repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs (default: %(default)s)")
    parser.add_argument("--size", choices=SIZES, default="2M", help="of the model (default: %(default)s)")
    for name, default in (("rollouts", 64), ("group-size", 8), ("turns", 8), ("prompt-tokens", 128)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    for name, default in (("turn-tokens", 32), ("tool-tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=default, help="per turn (default: %(default)s)")
    parser.add_argument("--tool-s", type=float, default=0.2, help="mean time of a tool (default: %(default)s)")
    options = parser.parse_args()
    load = Load(**{name: getattr(options, name) for name in Load.__slots__})
    print(json.dumps(run(options.size, load, options.repeats)))


if __name__ == "__main__":
    main()
