"""Tools of `benchmarks.agents`: a producer whose rollouts are agents elsewhere, and a watch over its event loop."""

import asyncio
import gc
import json
import subprocess
import sys
import time
from asyncio.events import Handle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from async_rl.config.pool_section import PoolSection
from async_rl.config.prompts_section import PromptsSection
from async_rl.config.reward_section import RewardSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.errors import ConfigError
from async_rl.event_loop import EventLoopThread
from async_rl.gateway.gateway import Gateway
from async_rl.gateway.programs import ServedProgram
from async_rl.pool.inference_pool import InferencePool
from async_rl.producer.local import LocalProducer as Producer
from async_rl.rewards import make_reward
from async_rl.rollout.program import ProgramPrompt, RolloutResult
from async_rl.rollout.program_rollouts import ProgramRollouts
from async_rl.rollout.rendering import TemplateRenderer
from async_rl.rollout.session import RolloutSession, Sessions
from async_rl.token_arrays import TokenIds
from async_rl.types import Batch, Prompt
from benchmarks.producer.mock_instance import Script
from benchmarks.producer.rig import VERSION, mock_instances

NUM_INSTANCES = 2
NUM_WORDS = 32_000

TEMPLATE = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word " wN", which are the first ones, so that texts of sampled tokens are encoded to the same."""
    words = [f" w{i}" for i in range(NUM_WORDS)]
    vocab = {word: i for i, word in enumerate([*words, "\n", "user", "assistant", "tool", "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n| ?\w+"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = TEMPLATE
    return fast


class AgentsElsewhere:
    """Implements `Program`: each rollout is run by a client in another process, which is told its base URL."""

    def __init__(self, clients: "subprocess.Popen[str]") -> None:
        self._clients = clients
        self._ended: dict[str, asyncio.Future[RolloutResult]] = {}
        self.turn_s: list[float] = []

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        loop.run_in_executor(None, self._read, loop)

    async def run(self, prompt: ProgramPrompt, session: RolloutSession) -> RolloutResult:
        ended = self._ended[prompt.base_url] = asyncio.get_running_loop().create_future()
        assert self._clients.stdin is not None
        order = {"base_url": prompt.base_url, **prompt.row}
        self._clients.stdin.write(json.dumps(order) + "\n")
        self._clients.stdin.flush()
        result: RolloutResult = await ended
        return result

    async def close(self) -> None:
        self._clients.kill()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._clients.stdout is not None
        for line in self._clients.stdout:
            loop.call_soon_threadsafe(self._end, json.loads(line))
        loop.call_soon_threadsafe(self._fail)

    def _fail(self) -> None:
        for ended in self._ended.values():
            if not ended.done():
                ended.set_exception(ConfigError("the clients have ended; their error is above"))

    def _end(self, report: dict[str, Any]) -> None:
        self.turn_s += report["turn_s"]
        self._ended.pop(report["base_url"]).set_result(RolloutResult(float(len(report["turn_s"]))))


class LongestStep:
    """The longest step of an event loop: what it keeps all others waiting for."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = self.own_s = self.collecting_s = 0.0
        self.what = ""
        self.steps_s: list[float] = []

    @contextmanager
    def watched(self) -> Iterator["LongestStep"]:
        """Times every step of all event loops meanwhile, and garbage collection, which is part of the steps."""
        run = Handle._run
        begun_s = collected_s = 0.0

        def timed(handle: Any) -> None:
            wall_s, cpu_s, before_s = time.perf_counter(), time.thread_time(), collected_s
            run(handle)
            wall_s, cpu_s = time.perf_counter() - wall_s, time.thread_time() - cpu_s
            self.steps_s.append(cpu_s)
            self.wall_s = max(self.wall_s, wall_s)
            self.cpu_s = max(self.cpu_s, cpu_s)
            own_s = cpu_s - (collected_s - before_s)
            if own_s > self.own_s:
                self.own_s, self.what = own_s, _name_of(handle)

        def collecting(phase: str, info: dict[str, int]) -> None:
            nonlocal begun_s, collected_s
            if phase == "start":
                begun_s = time.thread_time()
            else:
                collected_s += time.thread_time() - begun_s
                self.collecting_s = max(self.collecting_s, time.thread_time() - begun_s)

        # The loop's own debug mode measures as well, and makes every step slower.
        Handle._run = timed  # type: ignore[method-assign, assignment]
        gc.callbacks.append(collecting)
        try:
            yield self
        finally:
            Handle._run = run  # type: ignore[method-assign]
            gc.callbacks.remove(collecting)


def _name_of(handle: Any) -> str:
    """Which step it is; without `repr`, which changes what it shows: a response of aiohttp would lose its headers."""
    # A task is bound to its step.
    task = getattr(handle._callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        return f"{task.get_name()}: {getattr(task.get_coro(), '__qualname__', '')}"
    return str(getattr(handle._callback, "__qualname__", type(handle._callback)))


@contextmanager
def open_producer(script: Script, num_rollouts: int, group_size: int) -> Iterator[tuple[Producer, AgentsElsewhere]]:
    """A producer whose groups are made by clients, and the clients."""
    with ExitStack() as closing:
        urls = tuple(url for _ in range(NUM_INSTANCES) for url in closing.enter_context(mock_instances(script)))
        loop = EventLoopThread()
        closing.callback(loop.close)
        pool = InferencePool(PoolSection(instances=urls))
        closing.callback(lambda: loop.run(pool.close()))
        loop.run(pool.wait_until_ready())
        loop.run(pool.begin_publish())
        loop.run(pool.end_publish(VERSION, urls))
        command = [sys.executable, "-m", "benchmarks.agents.clients"]
        clients = closing.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        rollout = RolloutSection(
            program="command:elsewhere",
            responses_per_prompt=group_size,
            max_response_tokens=2**20,
            max_turns=1000,
            max_concurrent=num_rollouts,
        )
        tokenizer = make_tokenizer()
        reward = make_reward(RewardSection())
        agents = AgentsElsewhere(clients)
        sessions = Sessions(pool, cast(Any, tokenizer), TemplateRenderer(tokenizer), rollout)
        program = ServedProgram(agents, Gateway(rollout, cast(Any, tokenizer)))
        prompts = PromptsSection(source="none", prompts_per_batch=1)
        programs = ProgramRollouts(program, sessions, reward, rollout, prompts, seed=0)
        producer = Producer(programs, loop)
        closing.callback(producer.close)
        yield producer, agents


def make_batch(iteration: int, rows: list[dict[str, Any]]) -> Batch:
    return Batch(iteration, {i: Prompt(str(i), TokenIds(range(8)), row) for i, row in enumerate(rows)})
