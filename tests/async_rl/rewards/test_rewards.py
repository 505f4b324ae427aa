import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rl.config.reward_section import RewardSection
from async_rl.errors import ConfigError, RewardError
from async_rl.event_loop import EventLoopThread
from async_rl.rewards import Reward, make_reward
from async_rl.types import Prompt, Response, WeightSpan
from tests.support.open_files import room_for_files

pytestmark = pytest.mark.distributed

USER_FILE = """
import asyncio, os, pathlib, sys, time
from dataclasses import dataclass
import neighbour

@dataclass
class Score:
    value: "float"

def lengths(prompt, responses, row):
    print("what a reward prints is not an answer")
    return [Score(float(len(r.token_ids) + len(r.text) + row["bonus"])).value for r in responses]

async def later(prompt, responses, row):
    await asyncio.sleep(0.01)
    return [row["bonus"] for _ in responses]

def pid(prompt, responses, row):
    return [os.getpid() for _ in responses]

def heavy_modules(prompt, responses, row):
    return [float(any(name in sys.modules for name in ("torch", "megatron", "aiohttp")))] * len(responses)

def raises(prompt, responses, row):
    raise KeyError("no such key in the reward")

async def raises_later(prompt, responses, row):
    raise KeyError("no such key in the reward")

def hangs_on(prompt, responses, row):
    if row.get("hang"):
        pathlib.Path(row.get("mark", os.devnull)).touch()
        time.sleep(3600)
    return [1.0 for _ in responses]

async def hangs_later(prompt, responses, row):
    await asyncio.sleep(3600)

def dies(prompt, responses, row):
    os._exit(3)

def nan(prompt, responses, row):
    return [float("nan")] * len(responses)

async def none_later(prompt, responses, row):
    return None
"""


def response(text: str) -> Response:
    return Response(
        token_ids=(5, 6),
        logprobs=(-0.1, -0.2),
        text=text,
        finish_reason="stop",
        weight_spans=(WeightSpan("v1", 0, 2),),
        instance="http://i",
    )


def prompt(**row: Any) -> Prompt:
    return Prompt("row7", (3, 4), {"bonus": 10} | row)


RESPONSES = (response("a"), response("bcd"))


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("")
    path = tmp_path / "my_reward.py"
    path.write_text(USER_FILE)
    return path


@pytest.fixture
def started(loop: EventLoopThread) -> Iterator[Callable[..., Reward]]:
    rewards: list[Reward] = []

    def start(name: str, **options: Any) -> Reward:
        rewards.append(make_reward(RewardSection(name=name, **options)))
        loop.run(rewards[-1].start())
        return rewards[-1]

    yield start
    for reward in rewards:
        loop.run(reward.close())


def test_reasoning_gym_scores_by_the_task_itself(started: Callable[..., Reward], loop: EventLoopThread) -> None:
    reward = started("reasoning_gym")
    row = {"question": "q", "answer": "tac", "metadata": {"source_dataset": "spell_backward"}}
    responses = [response(text) for text in ("tac", " TAC\n", "xyz", "so: <answer>no</answer><answer>tac</answer>")]
    assert loop.run(reward.score(prompt(**row), responses)).rewards == (1.0, 1.0, 0.0, 1.0)
    options = {"seed": 1, "min_word_len": 4}
    row |= {"task": "spell_backward", "task_options": options}
    assert loop.run(reward.score(prompt(**row), responses[:1])).rewards == (1.0,)


@pytest.mark.parametrize("answer", ["1/2", "$\\frac{1}{2}$", "halves of one\n#### 0.5", 0.5])
def test_math_compares_final_answers_mathematically(
    started: Callable[..., Reward], loop: EventLoopThread, answer: object
) -> None:
    texts = ("it is \\boxed{\\frac{2}{4}}", "the answer is 0.5", "\\boxed{2}", "I do not know")
    scores = loop.run(started("math").score(prompt(answer=answer), [response(text) for text in texts]))
    assert scores.rewards == (1.0, 1.0, 0.0, 0.0)


def test_reward_without_what_its_row_needs_names_it(started: Callable[..., Reward], loop: EventLoopThread) -> None:
    with pytest.raises(RewardError, match=r"(?s)'math', prompt row7.*the row has no 'answer'"):
        loop.run(started("math").score(prompt(), RESPONSES))


@pytest.mark.parametrize(("function", "scores"), [("lengths", (13.0, 15.0)), ("later", (10.0, 10.0))])
def test_users_function_scores_with_prompt_responses_and_row(
    started: Callable[..., Reward], loop: EventLoopThread, user_file: Path, function: str, scores: tuple[float, ...]
) -> None:
    assert loop.run(started(f"python:{user_file}:{function}").score(prompt(), RESPONSES)).rewards == scores


def test_synchronous_reward_runs_in_a_process_without_the_trainers_packages(
    started: Callable[..., Reward], loop: EventLoopThread, user_file: Path
) -> None:
    assert loop.run(started(f"python:{user_file}:pid").score(prompt(), RESPONSES)).rewards[0] != os.getpid()
    assert loop.run(started(f"python:{user_file}:heavy_modules").score(prompt(), RESPONSES)).rewards == (0.0, 0.0)


@pytest.mark.parametrize("function", ["raises", "raises_later"])
def test_error_of_a_reward_names_reward_prompt_and_cause(
    started: Callable[..., Reward], loop: EventLoopThread, user_file: Path, function: str
) -> None:
    reward = started(f"python:{user_file}:{function}")
    with pytest.raises(RewardError, match=rf"(?s)my_reward.py:{function}', prompt row7.*in {function}.*no such key"):
        loop.run(reward.score(prompt(), RESPONSES))


def test_hung_reward_is_killed_and_the_next_group_is_scored(
    started: Callable[..., Reward], loop: EventLoopThread, user_file: Path
) -> None:
    reward = started(f"python:{user_file}:hangs_on", timeout_s=2.0)
    with pytest.raises(RewardError, match=r"hangs_on', prompt row7: no answer within reward.timeout_s = 2 s"):
        loop.run(reward.score(prompt(hang=True), RESPONSES))
    assert loop.run(reward.score(prompt(), RESPONSES)).rewards == (1.0, 1.0)


def test_hung_asynchronous_reward_ends_in_its_timeout(
    started: Callable[..., Reward], loop: EventLoopThread, user_file: Path
) -> None:
    reward = started(f"python:{user_file}:hangs_later", timeout_s=0.2)
    with pytest.raises(RewardError, match=r"prompt row7: no answer within reward.timeout_s = 0.2 s"):
        loop.run(reward.score(prompt(), RESPONSES))


def test_cancelled_call_leaves_a_worker_for_the_next(
    started: Callable[..., Reward], loop: EventLoopThread, user_file: Path
) -> None:
    reward = started(f"python:{user_file}:hangs_on")
    with pytest.raises(TimeoutError):
        loop.run(reward.score(prompt(hang=True), RESPONSES), timeout_s=0.2)
    assert loop.run(reward.score(prompt(), RESPONSES)).rewards == (1.0, 1.0)


def test_reward_that_ends_its_process_is_an_error(
    started: Callable[..., Reward], loop: EventLoopThread, user_file: Path
) -> None:
    with pytest.raises(RewardError, match=r"prompt row7: its process ended .exit code 3"):
        loop.run(started(f"python:{user_file}:dies").score(prompt(), RESPONSES))


def test_a_process_that_cannot_be_started_again_is_an_error_with_its_remedy(
    started: Callable[..., Reward], loop: EventLoopThread, user_file: Path
) -> None:
    reward = started(f"python:{user_file}:lengths")
    # As if another call had ended its process.
    loop.run(reward.close())
    message = r"(?s)prompt row7: its process ended .it cannot be started: .*Too many open files; raise .*ulimit -n"
    with room_for_files(0), pytest.raises(RewardError, match=message):
        loop.run(reward.score(prompt(), RESPONSES))
    assert loop.run(reward.score(prompt(), RESPONSES)).rewards == (13.0, 15.0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nan", "returned nan among its values"),
        ("none_later", "returned None, expected 2 finite floats"),
    ],
)
def test_anything_but_one_finite_float_per_response_is_an_error(
    started: Callable[..., Reward], loop: EventLoopThread, user_file: Path, function: str, message: str
) -> None:
    with pytest.raises(RewardError, match=f"(?s)prompt row7.*{message}"):
        loop.run(started(f"python:{user_file}:{function}").score(prompt(), RESPONSES))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bleu", "reward.name is 'bleu': expected math, .*code, http, judge or python:"),
        ("python:{dir}/none.py:score", "no such file '.*none.py'"),
        ("python:{dir}/my_reward.py", "no such file"),
        ("python:{dir}/my_reward.py:score", "has no function 'score'; it has .*'lengths'"),
        ("python:{dir}/broken.py:score", "(?s)loading .*broken.py failed:.*SyntaxError"),
    ],
)
def test_reward_that_cannot_be_loaded_is_a_config_error(
    started: Callable[..., Reward], user_file: Path, name: str, message: str
) -> None:
    (user_file.parent / "broken.py").write_text("def score(:")
    with pytest.raises(ConfigError, match=message):
        started(name.format(dir=user_file.parent))


def test_worker_ends_with_its_parent_even_amid_a_hung_reward(user_file: Path) -> None:
    mark = user_file.parent / "hangs"
    program = f"""
import asyncio, os, pathlib
from async_rl.config.reward_section import RewardSection
from async_rl.rewards import make_reward
from async_rl.types import Prompt

async def main():
    reward = make_reward(RewardSection(name="python:{user_file}:hangs_on"))
    await reward.start()
    asyncio.create_task(reward.score(Prompt("row7", (3,), {{"hang": True, "mark": "{mark}"}}), ()))
    while not pathlib.Path("{mark}").exists():
        await asyncio.sleep(0.01)
    print(reward._workers[0].process.pid, flush=True)
    os._exit(1)

asyncio.run(main())
"""
    parent = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    worker = psutil.Process(int(parent.stdout)) if psutil.pid_exists(int(parent.stdout)) else None
    assert worker is None or psutil.wait_procs([worker], timeout=60)[1] == []
