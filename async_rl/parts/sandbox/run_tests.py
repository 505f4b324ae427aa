"""Runs the unit tests of one response: many tests share one start of a sandbox, until one of them ends it."""

import asyncio
import contextlib
import json
import math
import time
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any

from async_rl.parts.sandbox import Limits, Sandbox
from async_rl.parts.sandbox.process import SandboxProcess
from async_rl.parts.sandbox.unit_tests import AssertTests, InputOutputTests, UnitTests

MAX_BYTES = 16 * 2**20
"""Of what a program prints in one test, or what a function returns, as JSON."""

ALL_CPU_S = 10**6
"""Of a process that runs many tests, each of which has a time of its own."""

CALL, RESULT = b"?", b"="
"""The first byte of what `async_rl/parts/sandbox/inside/checker.py` sends."""


async def run_tests(sandbox: Sandbox, code: str, tests: UnitTests, limits: Limits, until: float) -> int:
    """How many tests pass before the time `until` (of `time.monotonic`); those that have no time left do not.

    Args:
        limits: of one test.

    Raises:
        SandboxFailed: the sandbox itself failed.
    """
    run = _run_programs if isinstance(tests, InputOutputTests) else _run_asserts
    return await run(sandbox, code, tests, limits, until)  # type: ignore[arg-type]


async def _run_programs(sandbox: Sandbox, code: str, tests: InputOutputTests, limits: Limits, until: float) -> int:
    passed = 0
    fields = {"source": code, "cpu_s": math.ceil(limits.cpu_s), "output_bytes": MAX_BYTES}
    async with contextlib.aclosing(_Process(sandbox, limits, "cases", **fields)) as program:
        for given, expected in zip(tests.inputs, tests.outputs, strict=True):
            answer = await program.ask(given.encode(errors="replace"), _time_s(limits, until)) or b""
            # Its first byte tells whether the exit code was 0.
            passed += answer[:1] == b"\1" and same_output(answer[1:].decode(errors="replace"), expected)
    return passed


async def _run_asserts(sandbox: Sandbox, code: str, tests: AssertTests, limits: Limits, until: float) -> int:
    async with contextlib.aclosing(_Process(sandbox, limits, "calls", source=code)) as solution:
        names = _names(await solution.ask(b"", _time_s(limits, until)))
        if names is None:
            return 0
        fields = {"setup": tests.setup, "tests": list(tests.tests), "entry": tests.entry, "names": names}
        async with sandbox.process(replace(limits, cpu_s=ALL_CPU_S), "checker", **fields) as checker:
            passed = 0
            with contextlib.suppress(TimeoutError, EOFError):
                for _ in tests.tests:
                    if time.monotonic() >= until:
                        break
                    passed += await _judge(checker, solution, limits, until)
    return passed


async def _judge(checker: SandboxProcess, solution: "_Process", limits: Limits, until: float) -> bool:
    """Passes the calls of one test on, until its result.

    Raises:
        TimeoutError, EOFError: the tests themselves take too long, or ended their process: the others cannot be run.
    """
    test_until = time.monotonic() + _time_s(limits, until)
    while True:
        # What the code returned is read there, and may take any time.
        async with asyncio.timeout(_time_s(limits, until)):
            message = await checker.receive(MAX_BYTES)
        if message[:1] == RESULT:
            return message[1:] == b"\1"
        answer = await solution.ask(message[1:], _time_s(limits, test_until))
        await checker.send(answer or b"")


class _Process:
    """An isolated process, started again for the next question after one has ended it."""

    def __init__(self, sandbox: Sandbox, limits: Limits, kind: str, **fields: Any) -> None:
        self._start = partial(sandbox.process, replace(limits, cpu_s=ALL_CPU_S), kind, **fields)
        self._running = contextlib.AsyncExitStack()
        self._process: SandboxProcess | None = None

    async def ask(self, question: bytes, time_s: float) -> bytes | None:
        """The answer; None if the process ended, or took longer."""
        if time_s <= 0:
            return None
        if self._process is None:
            self._process = await self._running.enter_async_context(self._start())
        process = self._process
        try:
            async with asyncio.timeout(time_s):
                await process.send(question)
                return await process.receive(MAX_BYTES)
        except (TimeoutError, EOFError):
            await self.aclose()
            return None

    async def aclose(self) -> None:
        self._process = None
        await self._running.aclose()


def _time_s(limits: Limits, until: float) -> float:
    return min(limits.wall_s, until - time.monotonic())


def _names(answer: bytes | None) -> list[str] | None:
    """The names that the code defines, as far as what it sent is such a list; None if it could not be loaded."""
    try:
        names = json.loads(answer or b"")
    except (ValueError, RecursionError):
        return None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else None


def same_output(printed: str, expected: str) -> bool:
    """Whether the lines are equal, but for space at their ends, empty lines at the end, and how numbers are written."""
    lines, expected_lines = ([line.split() for line in text.rstrip().splitlines()] for text in (printed, expected))
    return len(lines) == len(expected_lines) and all(map(_same_line, lines, expected_lines))


def _same_line(words: list[str], expected: list[str]) -> bool:
    return words == expected or (len(words) == len(expected) and all(map(_same_word, words, expected)))


def _same_word(word: str, expected: str) -> bool:
    try:
        return word == expected or Decimal(word) == Decimal(expected)
    except InvalidOperation:
        return False
