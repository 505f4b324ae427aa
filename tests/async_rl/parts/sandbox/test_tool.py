"""The Python tool: its state over calls, and what ends it."""

import asyncio
import os
from collections.abc import Callable

import pytest

from async_rl.parts.sandbox import Limits, Sandbox, open_python_tool, open_sandbox
from tests.support.sandbox_worker import processes_with

pytestmark = pytest.mark.distributed

LOST = "its state is lost]"


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return asyncio.run(open_sandbox())


@pytest.fixture
def say(sandbox: Sandbox) -> Callable[..., list[str]]:
    """`say(code, ...)`: what one tool answers, one call after the other."""

    def say(*calls: str, wall_s: float = 30.0, **limits: int) -> list[str]:
        async def talk() -> list[str]:
            async with open_python_tool(sandbox, Limits(wall_s=wall_s, **limits)) as tool:
                return [await tool.call(code) for code in calls]

        return asyncio.run(talk())

    return say


def test_names_files_and_modules_last_from_call_to_call(say: Callable[..., list[str]]) -> None:
    assert say(
        *("x = 1", "x += 1\nx", "import json", "json.dumps([x])", "open('f', 'w').write('text')", "open('f').read()"),
        *("def f(n): return 1 if n == 0 else n * f(n - 1)", "f(20)", "print(x); None", "", "_ = [y for y in range(x)]"),
    ) == ["", "2\n", "", "'[2]'\n", "4\n", "'text'\n", "", "2432902008176640000\n", "2\n", "", ""]


def test_code_that_forks_is_answered_once(say: Callable[..., list[str]]) -> None:
    answers = say("import os, time\nif os.fork() == 0: time.sleep(0.2)", *("x = 1", "x", "time.sleep(0.5)", "x + 1"))
    assert answers == ["", "", "1\n", "", "2\n"]


def test_a_tool_whose_block_has_ended_starts_nothing(sandbox: Sandbox) -> None:
    async def talk() -> None:
        async with open_python_tool(sandbox) as tool:
            await tool.call("1")
        with pytest.raises(RuntimeError, match="open another one"):
            await tool.call("2")

    asyncio.run(talk())


def test_an_exception_is_an_answer_and_keeps_the_state(say: Callable[..., list[str]]) -> None:
    answers = say("x = 1", "print('before')\n1 / 0", "x", "raise SystemExit(3)", "x(", "x")
    assert answers[1].startswith('before\nTraceback (most recent call last):\n  File "<call>", line 2')
    assert answers[1].endswith("ZeroDivisionError: division by zero\n")
    assert "SystemExit: 3" in answers[3] and "SyntaxError" in answers[4]
    assert (answers[2], answers[5]) == ("1\n", "1\n")


def test_output_of_other_processes_is_part_of_the_answer(say: Callable[..., list[str]]) -> None:
    assert say("import os", "os.system('echo out; echo err >&2')") == ["", "out\nerr\n0\n"]


def test_a_call_that_takes_too_long_is_interrupted_and_keeps_the_state(say: Callable[..., list[str]]) -> None:
    answers = say("x = 1", "while True: x += 1", "x > 1", wall_s=3.0)
    assert "TimeoutError: the call took too long" in answers[1]
    assert answers[2] == "True\n"


STUBBORN = "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass"


def test_a_call_that_cannot_be_interrupted_loses_the_state_and_says_so(say: Callable[..., list[str]]) -> None:
    answers = say("x = 1", STUBBORN, "'x' in globals()", wall_s=3.0)
    assert answers[1].endswith("took longer than 3 s and could not be interrupted; " + LOST)
    assert answers[2] == "False\n"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os; os._exit(0)", "it exited"),
        ("import ctypes; ctypes.string_at(0)", "it exited"),
        ("import os; os.kill(os.getpid(), 9)", "it exited"),
        ("import os; os.closerange(3, 256)", "it exited"),
    ],
)
def test_an_interpreter_that_ends_is_replaced(say: Callable[..., list[str]], code: str, why: str) -> None:
    lost, again = say(code, "1 + 1")
    assert f"the interpreter was ended: {why}; {LOST}" in lost
    assert again == "2\n"


def test_a_long_answer_is_cut(say: Callable[..., list[str]]) -> None:
    answers = say("print('x' * 3000)", "1", output_bytes=1000)
    assert answers == ["x" * 1000 + "\n[2001 more bytes]", "1\n"]


def test_code_that_speaks_in_the_tools_name_harms_only_itself(say: Callable[..., list[str]]) -> None:
    """It finds the connection and answers itself, with any length and any bytes."""
    forge = "import os\nfor n in range(3, 64):\n    try: os.write(n, {!r})\n    except OSError: pass"
    huge, garbage = say(forge.format(b"\xff\xff\xff\xff"), forge.format(b"\0\0\0\x02\xff\xfe"))
    assert LOST in huge
    assert garbage == "��"


def test_a_tool_that_is_not_called_starts_nothing_and_one_that_is_leaves_nothing(sandbox: Sandbox) -> None:
    mark = f"tool-{os.getpid()}"

    async def talk() -> None:
        async with open_python_tool(sandbox):
            pass
        async with open_python_tool(sandbox) as tool:
            # They hold none of the tool's outputs.
            closed = "stdin=-3, stdout=-3, stderr=-3, executable='/usr/bin/sleep'"
            await tool.call(f"import subprocess\nfor _ in range(20): subprocess.Popen(['{mark}', '1000'], {closed})")
            while not processes_with(mark):
                await asyncio.sleep(0.05)
        # Not a moment later.
        assert not processes_with(mark)

    asyncio.run(talk())


def test_tools_know_nothing_of_each_other(sandbox: Sandbox) -> None:
    async def one(number: int) -> str:
        async with open_python_tool(sandbox) as tool:
            await tool.call(f"x = {number}; open('f', 'w').write('{number}')")
            await asyncio.sleep(0.1)
            return await tool.call("x, open('f').read()")

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*map(one, range(20)))

    assert asyncio.run(all_of_them()) == [f"({number}, '{number}')\n" for number in range(20)]


def test_a_cancelled_call_ends_the_interpreter(sandbox: Sandbox) -> None:
    async def talk() -> str:
        async with open_python_tool(sandbox) as tool:
            await tool.call("x = 1")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await tool.call("import time; time.sleep(60)")
            return await tool.call("'x' in globals()")

    assert asyncio.run(talk()) == "False\n"
