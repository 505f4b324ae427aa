"""What a sandbox costs: programs, calls of the Python tool, and scored responses per second.

    python -m benchmarks.sandbox --json [--num-programs N] [--at-once K]

`bare` are interpreters without a sandbox, in turn with `programs` in one: `python -I -S -c pass` by `subprocess`, as
many at once. `programs` is `Sandbox.run` of one line of Python, `tool_calls` are calls of one Python tool in turn,
`stdio_responses` and `assert_responses` are responses with ten unit tests each, scored by the reward `code` in one
worker per core. The last line is one JSON object: each per second, and `ratio`, the median of `programs` / `bare` over
pairs.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

from async_rl.config.reward_section import RewardSection
from async_rl.rewards import make_reward
from async_rl.sandbox import Program, Sandbox, open_python_tool, open_sandbox
from async_rl.sandbox.backend import PYTHON
from async_rl.token_arrays import Logprobs, TokenIds
from async_rl.types import Prompt, Response, WeightSpan

PAIRS = 3
NUM_TESTS = 10
GROUP_SIZE = 8

PROGRAM = "print(sum(range(10)))"
STDIO = {"tests": {"inputs": [f"{i} 1" for i in range(NUM_TESTS)], "outputs": [str(i + 1) for i in range(NUM_TESTS)]}}
STDIO_CODE = "a, b = map(int, input().split())\nprint(a + b)"
ASSERTS = {"test_list": [f"assert add({i}, 1) == {i + 1}" for i in range(NUM_TESTS)]}
ASSERTS_CODE = "def add(a, b):\n    return a + b"


async def per_second(call: Callable[[], Awaitable[Any]], num_calls: int, at_once: int) -> float:
    """Calls per second, `at_once` of them at a time."""
    turns = asyncio.Semaphore(at_once)

    async def one() -> None:
        async with turns:
            await call()

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(num_calls)))
    return num_calls / (time.perf_counter() - began)


async def bare() -> None:
    process = await asyncio.create_subprocess_exec(str(PYTHON), "-I", "-S", "-c", "pass")
    assert await process.wait() == 0


async def programs(sandbox: Sandbox, num_programs: int, at_once: int) -> dict[str, float]:
    async def one() -> None:
        outcome = await sandbox.run(Program(PROGRAM))
        assert outcome.stdout == b"45\n", outcome

    # The first of both without being counted.
    await asyncio.gather(bare(), one())
    pairs = [
        (await per_second(bare, num_programs, at_once), await per_second(one, num_programs, at_once))
        for _ in range(PAIRS)
    ]
    return {
        "bare": statistics.median(without for without, _ in pairs),
        "programs": statistics.median(inside for _, inside in pairs),
        "ratio": statistics.median(inside / without for without, inside in pairs),
    }


async def tool_calls(sandbox: Sandbox, num_calls: int) -> float:
    async with open_python_tool(sandbox) as tool:
        await tool.call("x = 0")
        return await per_second(lambda: tool.call("x += 1; x"), num_calls, 1)


async def responses(row: dict[str, Any], code: str, num_responses: int) -> float:
    """Scored by the reward, in as many workers as there are cores."""
    num_workers = os.cpu_count() or 1
    reward = make_reward(RewardSection(name="code", num_workers=num_workers, timeout_s=600))
    text = f"```python\n{code}\n```"
    spans = (WeightSpan("v", 0, 1),)
    token = TokenIds([1])
    response = Response(
        token_ids=token, logprobs=Logprobs([0.0]), text=text, finish_reason="stop", weight_spans=spans, instance=""
    )
    group = [response] * GROUP_SIZE

    async def one() -> None:
        scores = await reward.score(Prompt("row", token, row), group)
        assert scores.rewards == (1.0,) * GROUP_SIZE

    await reward.start()
    try:
        await asyncio.gather(*(one() for _ in range(num_workers)))
        return GROUP_SIZE * await per_second(one, max(1, num_responses // GROUP_SIZE), num_workers)
    finally:
        await reward.close()


async def measure(num_programs: int, at_once: int) -> dict[str, Any]:
    sandbox = await open_sandbox()
    return {
        "backend": sandbox.backend.name,
        "cores": os.cpu_count(),
        **await programs(sandbox, num_programs, at_once),
        "tool_calls": await tool_calls(sandbox, num_programs),
        "stdio_responses": await responses(STDIO, STDIO_CODE, num_programs),
        "assert_responses": await responses(ASSERTS, ASSERTS_CODE, num_programs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    parser.add_argument("--num-programs", type=int, default=300)
    parser.add_argument("--at-once", type=int, default=3)
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.num_programs, arguments.at_once))
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, figure in figures.items():
        print(f"{name:>18} {figure if isinstance(figure, int | str) else f'{figure:.2f}'}")


if __name__ == "__main__":
    main()
