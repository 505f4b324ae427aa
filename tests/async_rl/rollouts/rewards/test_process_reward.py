"""What becomes of a reward that misbehaves, in either kind of process; each way is in `workers/test_worker.py`."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from async_rl.config.reward_section import RewardSection
from async_rl.errors import ConfigError, RewardError
from async_rl.method.types import Prompt
from async_rl.rollouts.rewards import Reward, make_reward
from async_rl.shared.event_loop import EventLoopThread
from tests.support.groups import text_responses

pytestmark = pytest.mark.distributed

TIMEOUT_S = 2.0
IN_TIME_S = 60.0
"""An error that comes by itself, or by the timeout, does so at once; a machine under load starts processes slowly."""

REWARDS = """
import asyncio, os, time

def spoil(fault, row, responses):
    if fault == "raises": raise KeyError("no such column")
    if fault == "wrong shape": return [1.0]
    if fault == "endless": return iter(int, 1)
    if fault == "os._exit": os._exit(3)
    if fault == "blocks": time.sleep(3600)
    if fault == "mutates":
        row.clear()
        if isinstance(responses, list): responses.clear()
    return [1.0] * len(responses)

def plain(prompt, responses, row):
    return spoil(row.get("fault"), row, responses)

async def eventual(prompt, responses, row):
    await asyncio.sleep(0)
    if row.get("fault") == "sleeps": await asyncio.sleep(3600)
    return spoil(row.get("fault"), row, responses)

eventual.correct_at = 0.5
"""

EITHER = {
    "raises": "(?s)in spoil.*no such column",
    "wrong shape": "returned 1 values, expected 2",
    "endless": "returned more, expected 2",
    "blocks": r"(?s)no answer within reward.timeout_s = 2 s; its process was killed; it was at:.*time.sleep\(3600\)",
    "os._exit": "its process ended .exit code 3.",
}
SLEEPS = {"sleeps": r"(?s)no answer within reward.timeout_s = 2 s; it was stopped:.*asyncio.sleep\(3600\)"}
FAULTS = {"plain": EITHER, "eventual": EITHER | SLEEPS}

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


@pytest.mark.parametrize("kind", FAULTS)
def test_what_a_reward_does_to_a_row_harms_nobody(
    rewards: dict[str, Reward], shared_loop: EventLoopThread, kind: str
) -> None:
    given = prompt("mutates")
    assert shared_loop.run(rewards[kind].score(given, RESPONSES), IN_TIME_S).rewards == (1.0, 1.0)
    assert given.row == {"fault": "mutates"}


@pytest.mark.parametrize(("kind", "fault"), [("plain", "blocks"), ("eventual", "sleeps")])
def test_a_batch_that_is_left_amid_a_call_leaves_the_worker_to_the_next(
    rewards: dict[str, Reward], shared_loop: EventLoopThread, kind: str, fault: str
) -> None:
    with pytest.raises(TimeoutError):
        shared_loop.run(rewards[kind].score(prompt(fault), RESPONSES), 0.1)
    assert shared_loop.run(rewards[kind].score(prompt(), RESPONSES), IN_TIME_S).rewards == (1.0, 1.0)


def test_calls_beside_one_that_blocks_are_made_again_and_lose_nothing(
    rewards: dict[str, Reward], shared_loop: EventLoopThread
) -> None:
    blocking = shared_loop.submit(rewards["eventual"].score(prompt("blocks"), RESPONSES))
    others = [shared_loop.submit(rewards["eventual"].score(prompt(), RESPONSES)) for _ in range(8)]
    with pytest.raises(RewardError, match="row of blocks"):
        blocking.result(IN_TIME_S)
    assert [other.result(IN_TIME_S).rewards for other in others] == [(1.0, 1.0)] * 8


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
def flaky(tmp_path: Path, started: Callable[..., Reward]) -> Callable[..., Reward]:
    (tmp_path / "flaky.py").write_text(FLAKY)
    return lambda function, **options: started(f"python:{tmp_path / 'flaky.py'}:{function}", **options)


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
