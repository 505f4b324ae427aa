"""Every way in which a reward can misbehave, synchronous and asynchronous, in a batch and at its end."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rl.config.reward_section import RewardSection
from async_rl.errors import ConfigError, RewardError
from async_rl.event_loop import EventLoopThread
from async_rl.rewards import Reward, make_reward, worker_process
from async_rl.types import Prompt
from tests.support.groups import text_responses

pytestmark = pytest.mark.distributed

TIMEOUT_S = 2.0
IN_TIME_S = 60.0
"""An error that comes by itself, or by the timeout, does so at once; a machine under load starts processes slowly."""

REWARDS = """
import asyncio, os, re, sys, threading, time

never = asyncio.Event()

def spoil(fault, row, responses):
    if fault == "raises": raise KeyError("no such column")
    if fault == "wrong shape": return [1.0]
    if fault == "endless": return iter(int, 1)
    if fault == "sys.exit": sys.exit(3)
    if fault == "os._exit": os._exit(3)
    if fault == "closes its files": os.closerange(0, 64)
    if fault == "keyboard": raise KeyboardInterrupt
    if fault == "generator exit": raise GeneratorExit
    if fault == "cancelled": raise asyncio.CancelledError
    if fault == "blocks": time.sleep(3600)
    if fault == "spins":
        while True: pass
    if fault == "holds": re.match("(a+)+$", "a" * 64 + "b")
    if fault == "floods":
        for _ in range(200): print("x" * 10_000)
        sys.stdout.flush()
    if fault == "mutates":
        row.clear()
        if isinstance(responses, list): responses.clear()
    return [1.0] * len(responses)

def plain(prompt, responses, row):
    fault = row.get("fault")
    if fault == "threads": threading.Thread(target=time.sleep, args=(3600,)).start()
    return spoil(fault, row, responses)

async def eventual(prompt, responses, row):
    fault = row.get("fault")
    await asyncio.sleep(0)
    if fault == "swallows":
        while True:
            try: await never.wait()
            except asyncio.CancelledError: pass
    if fault == "sleeps": await asyncio.sleep(3600)
    if fault == "tasks":
        for _ in range(100): asyncio.get_running_loop().create_task(never.wait())
    if fault == "cancels itself":
        asyncio.current_task().cancel()
        await asyncio.sleep(1)
    if fault == "exits in a task":
        async def end(): sys.exit(3)
        asyncio.get_running_loop().create_task(end())
        await asyncio.sleep(3600)
    if fault == "stops the loop":
        asyncio.get_running_loop().stop()
        await asyncio.sleep(3600)
    return spoil(fault, row, responses)

eventual.correct_at = 0.5
"""

EITHER = {
    "raises": "(?s)in spoil.*no such column",
    "wrong shape": "returned 1 values, expected 2",
    "endless": "returned more, expected 2",
    "sys.exit": "SystemExit: 3",
    "keyboard": "KeyboardInterrupt",
    "generator exit": "GeneratorExit",
    "cancelled": "CancelledError",
    "blocks": r"(?s)no answer within reward.timeout_s = 2 s; its process was killed; it was at:.*time.sleep\(3600\)",
}
"""Of a call, which the worker runs in one way if the function is synchronous, and in another if it is not."""

OF_PROCESS = {
    "os._exit": "its process ended .exit code 3.",
    "closes its files": "its process ended|its process was killed",
    "spins": "(?s)no answer within reward.timeout_s = 2 s; its process was killed; it was at:.*while True",
}
"""Of the process, which is the same to its parent whatever it runs."""

ASYNCHRONOUS = {
    "swallows": "no answer within reward.timeout_s = 2 s; its process was killed",
    "sleeps": r"(?s)no answer within reward.timeout_s = 2 s; it was stopped:.*asyncio.sleep\(3600\)",
    "cancels itself": "CancelledError",
    "exits in a task": "its process ended",
    "stops the loop": "its process ended",
}
FAULTS = {"plain": EITHER | OF_PROCESS, "eventual": EITHER | ASYNCHRONOUS}
HARMLESS = {"plain": ("floods", "mutates", "threads"), "eventual": ("tasks",)}
HANGS = {"plain": ("blocks",), "eventual": ("swallows", "sleeps")}

RESPONSES = text_responses("a", "bcd")


def prompt(fault: str | None = None) -> Prompt:
    return Prompt(f"row of {fault}", (3, 4), {"fault": fault})


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "reward.py"
    path.write_text(REWARDS)
    return path


@pytest.fixture(scope="module")
def shared_loop() -> Iterator[EventLoopThread]:
    loop = EventLoopThread()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def rewards(file: Path, shared_loop: EventLoopThread) -> Iterator[dict[str, Reward]]:
    """One reward of each kind for all tests: each fault meets what the faults before it left."""
    made = {
        name: make_reward(RewardSection(name=f"python:{file}:{name}", timeout_s=TIMEOUT_S))
        for name in ("plain", "eventual")
    }
    for reward in made.values():
        shared_loop.run(reward.start())
    yield made
    for reward in made.values():
        shared_loop.run(reward.close(), IN_TIME_S)


@pytest.mark.parametrize(("kind", "fault"), [(kind, fault) for kind, faults in FAULTS.items() for fault in faults])
def test_every_fault_is_a_named_error_in_time_and_the_next_group_is_scored(
    rewards: dict[str, Reward], shared_loop: EventLoopThread, kind: str, fault: str
) -> None:
    with pytest.raises(RewardError, match=f"reward.py:{kind}', prompt row of {fault}") as caught:
        shared_loop.run(rewards[kind].score(prompt(fault), RESPONSES), IN_TIME_S)
    assert caught.match(FAULTS[kind][fault])
    assert shared_loop.run(rewards[kind].score(prompt(), RESPONSES), IN_TIME_S).rewards == (1.0, 1.0)


def test_an_error_says_where_a_call_is_however_late_its_process_comes_to_say_so(
    file: Path, shared_loop: EventLoopThread
) -> None:
    """As on a busy machine, here because it is stopped for a while."""
    reward: Any = make_reward(RewardSection(name=f"python:{file}:plain", timeout_s=2.0))
    shared_loop.run(reward.start())
    process = psutil.Process(reward._workers[0].process.pid)
    before_s = process.cpu_times().user
    call = shared_loop.submit(reward.score(prompt("spins"), RESPONSES))
    while process.cpu_times().user < before_s + 0.1:
        time.sleep(0.01)
    process.suspend()
    time.sleep(3.0)
    assert not call.done()
    process.resume()
    with pytest.raises(RewardError, match=r"(?s)its process was killed; it was at:.*while True"):
        call.result(IN_TIME_S)
    shared_loop.run(reward.close(), IN_TIME_S)


def test_code_that_does_not_let_the_interpreter_go_is_named_after_a_while_of_its_own(
    file: Path, shared_loop: EventLoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "SILENT_CPU_S", 0.5)
    reward = make_reward(RewardSection(name=f"python:{file}:plain", timeout_s=0.5))
    shared_loop.run(reward.start())
    with pytest.raises(RewardError, match="its process was killed; it does not let the interpreter go"):
        shared_loop.run(reward.score(prompt("holds"), RESPONSES), IN_TIME_S)
    shared_loop.run(reward.close(), IN_TIME_S)


@pytest.mark.parametrize(("kind", "fault"), [(kind, fault) for kind, faults in HARMLESS.items() for fault in faults])
def test_what_harms_nobody_else_is_no_fault(
    rewards: dict[str, Reward], shared_loop: EventLoopThread, kind: str, fault: str
) -> None:
    given = prompt(fault)
    assert shared_loop.run(rewards[kind].score(given, RESPONSES), IN_TIME_S).rewards == (1.0, 1.0)
    assert given.row == {"fault": fault}


@pytest.mark.parametrize(("kind", "fault"), [(kind, fault) for kind, faults in HANGS.items() for fault in faults])
def test_a_batch_that_is_left_amid_a_call_leaves_the_worker_to_the_next(
    rewards: dict[str, Reward], shared_loop: EventLoopThread, kind: str, fault: str
) -> None:
    with pytest.raises(TimeoutError):
        shared_loop.run(rewards[kind].score(prompt(fault), RESPONSES), 0.1)
    assert shared_loop.run(rewards[kind].score(prompt(), RESPONSES), IN_TIME_S).rewards == (1.0, 1.0)


@pytest.mark.parametrize(("kind", "faults"), HANGS.items())
def test_close_ends_whatever_is_under_way(
    file: Path, shared_loop: EventLoopThread, kind: str, faults: tuple[str, ...]
) -> None:
    reward: Any = make_reward(RewardSection(name=f"python:{file}:{kind}", num_workers=len(faults)))
    shared_loop.run(reward.start())
    processes = [psutil.Process(worker.process.pid) for worker in reward._workers]
    calls = [shared_loop.submit(reward.score(prompt(fault), RESPONSES)) for fault in faults]
    for call in calls:
        call.cancel()
    shared_loop.run(reward.close(), IN_TIME_S)
    assert psutil.wait_procs(processes, timeout=IN_TIME_S)[1] == []


def test_calls_beside_one_that_blocks_are_made_again_and_lose_nothing(
    file: Path, shared_loop: EventLoopThread, tmp_path: Path
) -> None:
    reward = make_reward(RewardSection(name=f"python:{file}:eventual", timeout_s=4.0))
    shared_loop.run(reward.start())
    blocking = shared_loop.submit(reward.score(prompt("blocks"), RESPONSES))
    time.sleep(2.0)  # so that the others' time is not over when the first one's is
    others = [shared_loop.submit(reward.score(prompt(), RESPONSES)) for _ in range(8)]
    with pytest.raises(RewardError, match="row of blocks"):
        blocking.result(IN_TIME_S)
    assert [other.result(IN_TIME_S).rewards for other in others] == [(1.0, 1.0)] * 8
    shared_loop.run(reward.close())


def test_a_worker_that_exits_takes_along_what_it_started(tmp_path: Path, shared_loop: EventLoopThread) -> None:
    """The child holds the worker's output too, so that the end of the worker is not seen there."""
    (tmp_path / "leaving.py").write_text(
        "import os, pathlib, time\ndef leaving(prompt, responses, row):\n"
        "    child = os.fork()\n    if not child: time.sleep(3600)\n"
        f"    pathlib.Path({str(tmp_path / 'left')!r}).write_text(str(child))\n    os._exit(7)\n"
    )
    reward = make_reward(RewardSection(name=f"python:{tmp_path / 'leaving.py'}:leaving", timeout_s=60.0))
    shared_loop.run(reward.start())
    with pytest.raises(RewardError, match=r"its process ended.*exit code 7"):
        shared_loop.run(reward.score(prompt(), RESPONSES), IN_TIME_S)
    left = int((tmp_path / "left").read_text())
    if psutil.pid_exists(left):
        assert psutil.wait_procs([psutil.Process(left)], timeout=IN_TIME_S)[1] == []
    shared_loop.run(reward.close(), IN_TIME_S)


FLAKY = """
import asyncio, os, pathlib

under_way = 0
most = 0

def count(row):
    path = pathlib.Path(row["file"])
    number = int(path.read_text()) + 1 if path.exists() else 1
    path.write_text(str(number))
    return number

def flaky(prompt, responses, row):
    number = count(row)
    if number < row["good_from"]:
        raise ConnectionError(f"the judge is away, time {number}")
    return [float(number)] * len(responses)

async def crowded(prompt, responses, row):
    global under_way, most
    under_way += 1
    most = max(most, under_way)
    await asyncio.sleep(0.25)
    under_way -= 1
    return [most] * len(responses)
"""


@pytest.fixture
def flaky(tmp_path: Path, loop: EventLoopThread) -> Iterator[Callable[..., Reward]]:
    (tmp_path / "flaky.py").write_text(FLAKY)
    rewards: list[Reward] = []

    def start(function: str, **options: Any) -> Reward:
        rewards.append(make_reward(RewardSection(name=f"python:{tmp_path / 'flaky.py'}:{function}", **options)))
        loop.run(rewards[-1].start())
        return rewards[-1]

    yield start
    for reward in rewards:
        loop.run(reward.close())


def test_retry_makes_a_failed_call_again_so_often_and_no_more(
    flaky: Callable[..., Reward], loop: EventLoopThread, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reward = flaky("flaky", max_attempts=3)
    third = Prompt("row7", (3,), {"file": str(tmp_path / "third"), "good_from": 3})
    assert loop.run(reward.score(third, RESPONSES)).rewards == (3.0, 3.0)
    assert "prompt row7, attempt 2 of 3 failed" in caplog.text and "the judge is away, time 2" in caplog.text
    fourth = Prompt("row8", (3,), {"file": str(tmp_path / "fourth"), "good_from": 4})
    with pytest.raises(RewardError, match=r"(?s)prompt row8, attempt 3 of 3 failed:.*time 3"):
        loop.run(reward.score(fourth, RESPONSES))
    assert (tmp_path / "fourth").read_text() == "3"


def test_a_failed_call_is_not_made_again_unless_asked(
    flaky: Callable[..., Reward], loop: EventLoopThread, tmp_path: Path
) -> None:
    row = {"file": str(tmp_path / "count"), "good_from": 2}
    with pytest.raises(RewardError, match="prompt row7 failed"):
        loop.run(flaky("flaky").score(Prompt("row7", (3,), row), RESPONSES))
    assert (tmp_path / "count").read_text() == "1"


def test_asynchronous_calls_are_limited_and_their_time_begins_when_they_do(
    flaky: Callable[..., Reward], loop: EventLoopThread
) -> None:
    """36 calls of 0.25 s, three at once, take 3 s: more than each may take once it runs."""
    reward = flaky("crowded", max_concurrency=3, timeout_s=2.9)
    calls = [loop.submit(reward.score(Prompt(f"row{i}", (3,), {}), RESPONSES)) for i in range(36)]
    assert max(call.result(IN_TIME_S).rewards[0] for call in calls) == 3.0


@pytest.mark.parametrize(
    ("top", "message"),
    [
        ("import os; os._exit(4)", "exit code 4"),
        ("raise KeyError", "KeyE"),
        ("def score(*_): pass\nscore.correct_at = 'all'", "its correct_at is 'all': expected a number"),
    ],
)
def test_a_file_that_fails_when_it_is_loaded_is_a_config_error(
    tmp_path: Path, loop: EventLoopThread, top: str, message: str
) -> None:
    (tmp_path / "reward.py").write_text(top)
    reward = make_reward(RewardSection(name=f"python:{tmp_path / 'reward.py'}:score"))
    with pytest.raises(ConfigError, match=message) as caught:
        loop.run(reward.start())
    assert "importlib" not in str(caught.value), "the traceback is of the file's own code"
    loop.run(reward.close())


def test_a_reward_says_from_where_on_a_response_is_correct(rewards: dict[str, Reward]) -> None:
    assert (rewards["plain"].correct_at, rewards["eventual"].correct_at) == (None, 0.5)
