"""The share of a row's unit tests that the code of a response passes, in a sandbox: `reward.name = "code"`.

The code is the last fenced block of the response. No expected value is ever in the process or the sandbox where it
runs: what a program printed is compared here, and assertions run in a sandbox of their own, where the code's functions
are calls of the other one (`async_rl/parts/sandbox/inside/checker.py`). So code that exits early, prints what a test
framework prints, or replaces what judges it gains nothing.
"""

import asyncio
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from async_rl.config.reward_section import CodeOptions, RewardSection
from async_rl.method.types import Prompt, Response
from async_rl.parts.sandbox import Limits, Sandbox, open_sandbox
from async_rl.parts.sandbox.run_tests import run_tests
from async_rl.parts.sandbox.unit_tests import unit_tests
from async_rl.rollouts.rewards.base import USED_SHARE, correct_at
from async_rl.rollouts.rewards.function import RewardFunction

FENCED = re.compile(r"^([ \t]*)```[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
"""The space before a block, as of one in a list, and its lines."""


def make_score(config: RewardSection) -> RewardFunction:
    """The reward with the limits of the config; called in the worker.

    Raises:
        ConfigError: no sandbox works on this machine.
    """
    runner = asyncio.Runner()
    sandbox = runner.run(open_sandbox())
    options = config.read_options(CodeOptions)
    limits = Limits(
        wall_s=options.test_timeout_s,
        cpu_s=math.ceil(options.test_timeout_s),
        memory_bytes=options.test_memory_bytes,
    )

    @correct_at(1.0)
    def score(prompt: Prompt, responses: Sequence[Response], row: Mapping[str, Any]) -> list[float]:
        deadline = time.monotonic() + USED_SHARE * config.timeout_s
        return runner.run(_score(sandbox, limits, deadline, responses, row))

    return score


def extract_code(text: str) -> str | None:
    """The last fenced block of a response; None without one. A block that is not closed was cut short."""
    blocks = FENCED.findall(text)
    if not blocks:
        return None
    indent, code = blocks[-1]
    # As Markdown has it: its lines are as far in as the block, or less; but a first one that is not shows that all are
    # written from the margin.
    first = next((line for line in code.splitlines() if line.strip()), "")
    margin = min(len(indent), len(first) - len(first.lstrip(" \t")))
    return re.sub(rf"^[ \t]{{0,{margin}}}", "", code, flags=re.MULTILINE) if margin else code


async def _score(
    sandbox: Sandbox, limits: Limits, deadline: float, responses: Sequence[Response], row: Mapping[str, Any]
) -> list[float]:
    """One response after the other: `reward.num_workers` says how many run at once."""
    tests = unit_tests(row)
    rewards: list[float] = []
    for i, response in enumerate(responses):
        code = extract_code(response.text)
        # What one response leaves of its time, the next ones have; none can take it from them.
        until = time.monotonic() + (deadline - time.monotonic()) / (len(responses) - i)
        passed = await run_tests(sandbox, code, tests, limits, until) if code else 0
        rewards.append(passed / len(tests))
    return rewards
