"""Tools of `benchmarks.producer`: a producer on mock instances, its batches, and a steady rate of batches."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import cast

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from async_rl.config.pool_section import PoolSection
from async_rl.config.reward_section import RewardSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.method.token_arrays import TokenIds
from async_rl.method.types import Batch, Prompt
from async_rl.producer.client import RemoteRun
from async_rl.producer.dock import Docking
from async_rl.rollouts.data import prompts
from async_rl.rollouts.groups.group_maker import SingleTurns
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.rewards import make_reward
from async_rl.shared.event_loop import EventLoopThread
from benchmarks.common.local_producer import LocalProducer as Producer
from benchmarks.producer.mock_instance import Script

VERSION = "benchmark-0"
VOCAB_SIZE = 32_768
PROMPT_TOKENS = 128
MAX_RESPONSE_TOKENS = 16_384
NUM_PROCESSES = 2
"""With instances."""

TIMER_S = 0.01

REWARD = "async def score(prompt, responses, row):\n    return [float(len(r.text) % 2) for r in responses]\n"


@contextmanager
def open_producer(
    directory: Path,
    script: Script,
    responses_per_prompt: int,
    *,
    has_texts: bool = True,
    kind: type[Producer] = Producer,
    docking: Docking | None = None,
) -> Iterator[Producer]:
    """A producer whose instances are in service and follow `script`."""
    reward_file = directory / "reward.py"
    reward_file.write_text(REWARD)
    with ExitStack() as closing:
        urls = tuple(url for _ in range(NUM_PROCESSES) for url in closing.enter_context(mock_instances(script)))
        loop = EventLoopThread()
        closing.callback(loop.close)
        pool = InferencePool(PoolSection(instances=urls))
        closing.callback(lambda: loop.run(pool.close()))
        loop.run(pool.wait_until_ready())
        loop.run(pool.begin_publish())
        loop.run(pool.end_publish(VERSION, urls))
        reward = make_reward(RewardSection(name=f"python:{reward_file}:score"))
        rollout = RolloutSection(responses_per_prompt=responses_per_prompt, max_response_tokens=MAX_RESPONSE_TOKENS)
        tokenizer = make_tokenizer() if has_texts else cast(prompts.Tokenizer, NoTexts())
        producer = kind(SingleTurns(pool, reward, tokenizer, rollout, seed=0), loop, docking=docking)
        producer.with_texts = False
        closing.callback(producer.close)
        yield producer


@contextmanager
def mock_instances(script: Script) -> Iterator[list[str]]:
    """Starts a separate process with instances; yields their URLs."""
    command = [sys.executable, "-m", "benchmarks.producer.mock_instance", json.dumps(asdict(script))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            yield [f"http://127.0.0.1:{port}" for port in json.loads(process.stdout.readline())["ports"]]
        finally:
            process.kill()


class Lateness:
    """How late the producer's event loop was at most for a timer, in seconds, less the time that its thread waited for
    a core: for so long it was at work on other things."""

    def __init__(self, loop: EventLoopThread) -> None:
        self._loop = loop
        self.longest_s = 0.0

    def __enter__(self) -> "Lateness":
        self._task = self._loop.run(self._begin())
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._end())

    async def _begin(self) -> "asyncio.Task[None]":
        return asyncio.create_task(self._watch())

    async def _end(self) -> None:
        self._task.cancel()

    async def _watch(self) -> None:
        while True:
            due_s, waited_s = time.monotonic() + TIMER_S, waited_for_core_s()
            await asyncio.sleep(TIMER_S)
            late_s = time.monotonic() - due_s - (waited_for_core_s() - waited_s)
            self.longest_s = max(self.longest_s, late_s)


def waited_for_core_s() -> float:
    """How long this thread has been ready to run, without a core to run on (Linux)."""
    return 1e-9 * int(Path("/proc/thread-self/schedstat").read_text().split()[1])


class NoTexts:
    """A tokenizer whose texts are empty."""

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        return [""] * len(sequences)


def make_tokenizer() -> prompts.Tokenizer:
    """Decodes like the byte-level tokenizers of most models: one short word per token."""
    tokenizer = Tokenizer(models.BPE({f"Ġw{i}": i for i in range(VOCAB_SIZE)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return cast(prompts.Tokenizer, PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def make_batch(iteration: int, num_prompts: int) -> Batch:
    token_ids = TokenIds(range(PROMPT_TOKENS))
    return Batch(iteration, {i: Prompt(str(i), token_ids, {}) for i in range(num_prompts)})


class RolloutLoad:
    """Starts a batch of so many prompts every second and takes their groups; `keep_going` must be called repeatedly."""

    def __init__(self, start: Callable[[Batch, str], RemoteRun], prompts_per_s: int) -> None:
        self._start = start
        self._prompts_per_s = prompts_per_s
        self._runs: list[tuple[RemoteRun, int]] = []
        """The runs in progress, with the number of groups still to come."""
        self._iteration = 0
        self._due_s = 0.0
        self.num_tokens = 0
        """Response tokens taken so far."""
        self.taking_s = 0.0
        """Processor seconds in which groups were taken so far."""

    def __enter__(self) -> "RolloutLoad":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def begin(self) -> None:
        self._due_s = time.monotonic()

    def keep_going(self) -> None:
        """Takes finished groups, and starts prompts when they are due."""
        begun_s = time.thread_time()
        self._runs = [(run, left) for run, left in map(self._take, self._runs) if left]
        while time.monotonic() >= self._due_s:
            self._due_s += 1.0
            self._iteration += 1
            run = self._start(make_batch(self._iteration, self._prompts_per_s), VERSION)
            self._runs.append((run, self._prompts_per_s))
        self.taking_s += time.thread_time() - begun_s

    def end(self) -> None:
        """Ends all runs in progress."""
        for run, _ in self._runs:
            run.__exit__(None, None, None)
        self._runs = []

    def _take(self, entry: tuple[RemoteRun, int]) -> tuple[RemoteRun, int]:
        run, left = entry
        groups = run.ready(wait=False)
        self.num_tokens += sum(group.num_response_tokens for group in groups)
        if len(groups) == left:
            run.__exit__(None, None, None)
        return run, left - len(groups)
