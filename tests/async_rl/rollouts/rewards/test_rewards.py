import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.reward_section import RewardSection
from async_rl.errors import ConfigError, RewardError
from async_rl.method.types import Prompt
from async_rl.rollouts.rewards import Reward, make_reward
from async_rl.shared.event_loop import EventLoopThread
from tests.support.groups import text_responses
from tests.support.open_files import room_for_files

pytestmark = pytest.mark.distributed

USER_FILE = """
import asyncio, os, sys
from dataclasses import dataclass
import neighbour

@dataclass
class Score:
    value: "float"

def lengths(prompt, responses, row):
    print("what a reward prints is not an answer")
    if row.get("asks") == "process":
        return [os.getpid(), float(any(name in sys.modules for name in ("torch", "megatron", "aiohttp")))]
    return [Score(float(len(r.token_ids) + len(r.text) + row["bonus"])).value for r in responses]

async def later(prompt, responses, row):
    await asyncio.sleep(0.01)
    return [row["bonus"] for _ in responses]
"""


def prompt(**row: Any) -> Prompt:
    return Prompt("row7", (3, 4), {"bonus": 10} | row)


RESPONSES = text_responses("a", "bcd")


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("")
    path = tmp_path / "my_reward.py"
    path.write_text(USER_FILE)
    return path


def test_a_built_in_reward_scores_in_its_worker(started: Callable[..., Reward], loop: EventLoopThread) -> None:
    reward = started("math")
    assert loop.run(reward.score(prompt(answer="1/2"), text_responses("so 0.5", "\\boxed{2}"))).rewards == (1.0, 0.0)
    with pytest.raises(RewardError, match=r"(?s)'math', prompt row7.*the row has no 'answer'"):
        loop.run(reward.score(prompt(), RESPONSES))


@pytest.mark.cold
def test_a_users_function_scores_in_a_process_without_the_trainers_packages(
    started: Callable[..., Reward], loop: EventLoopThread, user_file: Path
) -> None:
    """And that process is started again where another call has ended it, or not, with the remedy."""
    reward = started(f"python:{user_file}:lengths")
    assert loop.run(reward.score(prompt(), RESPONSES)).rewards == (13.0, 15.0)
    pid, heavy = loop.run(reward.score(prompt(asks="process"), RESPONSES)).rewards
    assert pid != os.getpid() and heavy == 0.0
    loop.run(reward.close())
    message = r"(?s)prompt row7: its process cannot be started: .*Too many open files.*; raise .*ulimit -n"
    with room_for_files(0), pytest.raises(RewardError, match=message):
        loop.run(reward.score(prompt(), RESPONSES))
    assert loop.run(reward.score(prompt(), RESPONSES)).rewards == (13.0, 15.0)


def test_an_asynchronous_function_scores(
    started: Callable[..., Reward], loop: EventLoopThread, user_file: Path
) -> None:
    assert loop.run(started(f"python:{user_file}:later").score(prompt(), RESPONSES)).rewards == (10.0, 10.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bleu", "reward.name is 'bleu': expected math, .*code, http, judge or python:"),
        ("python:none.py:score", "no such file 'none.py'"),
    ],
)
def test_a_reward_that_is_not_there_is_a_config_error_before_a_process_is_started(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_reward(RewardSection(name=name))
