"""The reward `code`: unit tests of every form, and code that wants a reward without passing them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from async_rl.config.reward_section import RewardSection
from async_rl.method.types import Prompt
from async_rl.parts.sandbox.code import extract_code
from async_rl.rollouts.rewards import make_reward
from async_rl.shared.event_loop import EventLoopThread
from tests.support.groups import text_responses

TIMEOUT_S = 4.0


@pytest.fixture(scope="module")
def score_at_once() -> Iterator[Callable[..., list[list[float]]]]:
    """`score_at_once((row, code, ...), ...)`: the rewards of responses with this code for each row, by workers."""
    loop = EventLoopThread()
    reward = make_reward(
        RewardSection(name="code", options={"test_timeout_s": TIMEOUT_S}, timeout_s=200, num_workers=3)
    )
    loop.run(reward.start())
    assert reward.correct_at == 1.0

    def score(*calls: tuple[Any, ...]) -> list[list[float]]:
        begun = []
        for row, *codes in calls:
            responses = text_responses(*(f"So:\n```python\n{code}\n```\nDone." for code in codes))
            begun.append(loop.submit(reward.score(Prompt("row7", (1,), row), responses)))
        return [list(call.result(200).rewards) for call in begun]

    yield score
    loop.run(reward.close())
    loop.close()


@pytest.fixture(scope="module")
def score(score_at_once: Callable[..., list[list[float]]]) -> Callable[..., list[float]]:
    """The same for one row."""
    return lambda *call: score_at_once(call)[0]


ADD_PROGRAM = "a, b = map(int, input().split())\nprint(a + b)"
SUMS = {"inputs": ["1 2\n", "3 4\n", "5 6\n", "7 8\n"], "outputs": ["3\n", "7\n", "11\n", "15\n"]}
ADD = "def add(a, b):\n    return a + b"
ASSERTS = {"test_list": ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert math.isclose(add(0.5, 0.5), 1)"]}
CHECK = {
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n",
    "entry_point": "add",
}
METHOD = {"input_output": '{"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, [7]]}'}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"tests": SUMS}, ADD_PROGRAM),
        ({"tests": [{"input": "1 2", "output": "3"}, {"input": "3 4", "output": "7.0"}]}, ADD_PROGRAM),
        ({"tests": SUMS}, "if __name__ == '__main__':\n    " + ADD_PROGRAM.replace("\n", "\n    ")),
        ({"tests": SUMS}, "import sys\nfor line in sys.stdin: print(sum(map(int, line.split())), '\\n\\n')"),
        ({"tests": SUMS}, "import atexit, io, os\nout = io.StringIO()\na, b = map(int, input().split())\n"
         "print(a + b, file=out)\natexit.register(lambda: os.write(1, out.getvalue().encode()))"),
        ({"tests": SUMS}, "a, b = map(int, input().split())\nout = open(1, 'w')\nout.write(str(a + b))"),
        ({"tests": SUMS}, "import threading\na, b = map(int, input().split())\n"
         "threading.Timer(0.2, lambda: print(a + b)).start()"),
        ({"tests": SUMS}, "import sys\nprint('x' * 2**21, file=sys.stderr)\n" + ADD_PROGRAM),
        ({"tests": SUMS}, "import sys\nsys.stdout = open(1, 'w', closefd=False)\n" + ADD_PROGRAM),
        (ASSERTS, ADD),
        (ASSERTS, "add = lambda a, b: sum((a, b))"),
        (CHECK, ADD),
        (METHOD, ADD),
        (METHOD, "class Solution:\n    def add(self, a, b): return a + b"),
        ({"test_setup_code": "N = 4", "test_list": ["assert add(N, N) == 2 * N"]}, ADD),
        ({"test_list": ["assert list(count(3)) == [0, 1, 2]"]}, "def count(n):\n    yield from range(n)"),
        ({"test_list": ["p = Point(1, 2)\nassert p.x == 1 and p.norm() == 3"]},
         "class Point:\n    def __init__(self, x, y): self.x, self.y = x, y\n    def norm(self): return self.x + 2"),
        ({"test_list": ["x = [2, 1]\norder(x)\nassert x == [1, 2]"]}, "def order(x): x.sort()"),
        ({"test_list": ["try:\n    f(0)\n    assert False\nexcept ValueError: pass"]}, "def f(x): raise ValueError"),
        ({"test_list": ["assert f() == ((1, 2.5, None), {3}, {4: b'x'}, 10**400)"]},
         "def f(): return ((1, 2.5, None), {3}, {4: b'x'}, 10**400)"),
        # Functions with names of Python's own, in rows that say which function is tested.
        (CHECK | {"entry_point": "trace"}, ADD.replace("add", "trace")),
        ({"tests": {"fn_name": "sum", "inputs": [[1, 2]], "outputs": [3]}}, ADD.replace("add", "sum")),
        ({"tests": {"fn_name": "copy", "inputs": [[1, 2]], "outputs": [3]}},
         "class Solution:\n    def copy(self, a, b): return a + b"),
        ({"test_imports": ["import no_such_module"], "test_list": ["assert add(1, 2) == 3"]}, ADD),
    ],
)  # fmt: skip
def test_correct_code_has_all_its_tests(score: Callable[..., list[float]], row: dict[str, Any], code: str) -> None:
    assert score(row, code) == [1.0]


@pytest.mark.distributed
def test_a_reward_is_the_share_of_tests_passed(score: Callable[..., list[float]]) -> None:
    prints_three, only_small = "print(3)", ADD_PROGRAM.replace("print", "1 // (a < 4)\nprint")
    assert score({"tests": SUMS}, ADD_PROGRAM, prints_three, only_small) == [1.0, 0.25, 0.5]
    assert score(ASSERTS, ADD, "def add(a, b): return 3", "def add(a, b): return [][a]") == pytest.approx([1, 1 / 3, 0])


@pytest.mark.distributed
def test_a_slow_test_fails_alone(score_at_once: Callable[..., list[list[float]]]) -> None:
    sleeps = "import time\n" + ADD_PROGRAM + "\nif a == 3: time.sleep(99)"
    loops = "def add(a, b):\n    while a == b: pass\n    return a + b"
    calls = ({"tests": SUMS}, sleeps), ({"test_list": ASSERTS["test_list"][:2]}, loops)
    assert score_at_once(*calls) == [[0.75], [0.5]]


CHEATS = {
    "exits": "import os; os._exit(0)",
    "exits in the call": "def add(a, b):\n    import os; os._exit(0)",
    "exits softly": "import sys\ndef add(a, b): sys.exit(0)",
    "equals everything": "class E:\n    def __eq__(self, other): return True\n    __ne__ = lambda *_: False\n"
    "def add(a, b): return E()",
    "is an int that equals everything": "class E(int):\n    def __eq__(self, other): return True\n"
    "    __hash__ = int.__hash__\ndef add(a, b): return E(99)",
    "brings a list of such": "class E:\n    def __eq__(self, other): return True\ndef add(a, b): return [E()]",
    "brings its own isclose": "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef add(a, b): return 99",
    "replaces builtins": "import builtins\nbuiltins.AssertionError = type('X', (BaseException,), {})\n"
    "builtins.compile = builtins.exec = lambda *a, **k: None\ndef add(a, b): return 99",
    "defines builtins": "def abs(x): return 0\ndef len(x): return 0\ndef add(a, b): return 99",
    "says what a test framework says": "print('PASSED\\n4 passed in 0.01s\\nOK')\ndef add(a, b): return 99",
    "looks for the tests in memory": "import gc, sys\nfound = [o for o in gc.get_objects() if isinstance(o, dict)"
    " and ('outputs' in o or 'tests' in o)]\nadd = found[0]['tests'] if found else None",
    "looks for the tests in files": "import glob\nfiles = [f for f in glob.glob('/tmp/*') if 'program' not in f]\n"
    "found = ''.join(open(f).read() for f in files)\nprint(found)\ndef add(a, b): return found",
    "answers for the runner": "import os\nfor n in range(3, 128):\n    try: os.write(n % 64, b'\\0\\0\\0\\1\\1' * 99)\n"
    "    except OSError: pass\n    try: os.write(n, b'\\0\\0\\0\\2=\\1' * 99)\n    except OSError: pass",
    "attacks the runner": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "patches the runner": "import sys\nfor name, module in list(sys.modules.items()):\n    if 'sandbox' in name:\n"
    "        for key in list(vars(module)):\n            if callable(vars(module)[key]): setattr(module, key, print)",
    "is not Python": "you have to add the numbers",
    "is empty": "",
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", CHEATS)
def test_code_that_does_not_solve_the_task_has_no_reward(
    score_at_once: Callable[..., list[list[float]]], name: str
) -> None:
    rows = {"tests": SUMS}, {"test_list": ASSERTS["test_list"]}, CHECK
    assert score_at_once(*((row, CHEATS[name]) for row in rows)) == [[0.0]] * 3


@pytest.mark.distributed
def test_python_does_not_stand_in_for_a_function_of_its_name(score: Callable[..., list[float]]) -> None:
    row = {"test": "def check(candidate):\n    assert candidate(-1) == 1\n", "entry_point": "abs"}
    assert score(row, "pass", "def abs(x): return 0", "def abs(x): return max(x, -x)") == [0.0, 0.0, 1.0]


@pytest.mark.distributed
def test_code_that_breaks_what_runs_before_the_tests_does_not_judge_itself(score: Callable[..., list[float]]) -> None:
    row = {
        "test_setup_code": "tree = make(3)\ndef is_right(value):\n    return value == 3",
        "test_list": ["assert is_right(solve(3))"],
    }
    honest = "def make(n): return [n]\ndef solve(n): return make(n)[0]"
    cheating = "def make(n): raise ValueError\ndef solve(n): return 0\ndef is_right(value): return True"
    assert score(row, honest, cheating) == [1.0, 0.0]


@pytest.mark.distributed
def test_one_response_cannot_reach_the_next(score: Callable[..., list[float]]) -> None:
    leaves = "open('left', 'w').write('3')\nimport os\nif os.fork() == 0:\n    while True: pass\nprint(0)"
    takes = "print(open('left').read())"
    assert score({"tests": SUMS}, leaves, takes, ADD_PROGRAM) == [0.0, 0.0, 1.0]


@pytest.mark.distributed
def test_tests_that_have_no_time_left_fail_and_the_call_ends_in_time() -> None:
    loop = EventLoopThread()
    reward = make_reward(RewardSection(name="code", options={"test_timeout_s": 1.0}, timeout_s=12.0))
    try:
        loop.run(reward.start())
        row = {"tests": {"inputs": ["1 2"] * 12, "outputs": ["3"] * 12}}
        texts = [f"```\n{code}\n```" for code in ("while True: pass", "import time; time.sleep(99)", ADD_PROGRAM)]
        rewards = loop.run(reward.score(Prompt("row7", (1,), row), text_responses(*texts))).rewards
        assert rewards == (0.0, 0.0, 1.0)
    finally:
        loop.run(reward.close())
        loop.close()


SLOW_TO_READ = """
import json, os, stat, time
calls = []
def f(x):
    time.sleep(3)
    calls.append(x)
    if len(calls) == 1:
        return 0
    same_hash = json.dumps(["value", {"set": [i * (2**61 - 1) for i in range(1, 60_001)]}, [None]]).encode()
    message = len(same_hash).to_bytes(4, "big") + same_hash
    for fd in range(3, 20):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                while message:
                    message = message[os.write(fd, message):]
        except OSError:
            pass
    time.sleep(99)
"""
"""Writes an answer of its own, which takes minutes to read."""


@pytest.mark.distributed
def test_an_answer_that_takes_long_to_read_takes_no_more_than_the_calls_time() -> None:
    loop = EventLoopThread()
    reward = make_reward(RewardSection(name="code", options={"test_timeout_s": 4.0}, timeout_s=8.0))
    try:
        loop.run(reward.start())
        row = {"tests": {"fn_name": "f", "inputs": [[1]] * 9, "outputs": [3] * 9}}
        assert loop.run(
            reward.score(Prompt("row7", (1,), row), text_responses(f"```\n{SLOW_TO_READ}\n```"))
        ).rewards == (0.0,)
    finally:
        loop.run(reward.close())
        loop.close()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```\nx\n```\nbetter:\n```py\ny\n```\n", "y\n"),
        ("1. so:\n   ```python\n   if x:\n       y\n\n  z\n   ```", "if x:\n    y\n\nz\n"),
        ("  ```python\ndef f():\n  return 1\n  ```", "def f():\n  return 1\n"),
        ("```python\n  x\n```", "  x\n"),
        ("```python\n```", ""),
        ("no code", None),
        ("```python\nx = 1", None),
        ("```python\nx\n```\nthen\n```python\ny = ", "x\n"),
        ("`x`", None),
    ],
)
def test_code_is_the_last_fenced_block(text: str, code: str | None) -> None:
    assert extract_code(text) == code
