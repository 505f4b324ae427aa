"""Agents as processes: what they get, what counts as their result, and that nothing of them survives."""

import asyncio
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from async_rl.method.types import Prompt
from async_rl.parts.gateway.command_program import CommandProgram
from async_rl.parts.gateway.programs import ServedProgram
from async_rl.rollouts.agents.program import ProgramFailed, ProgramPrompt, RolloutResult
from async_rl.rollouts.agents.session import RolloutSession
from async_rl.rollouts.groups.trajectory import Trajectory
from tests.support.full_disk import largest_file
from tests.support.gateway_rig import VERSION, GatewayRig
from tests.support.open_files import room_for_files
from tests.support.rollout_settings import rollout_section

pytestmark = pytest.mark.distributed

ROW = {"question": "1 + 2?", "answer": "3", "long": "x" * 300_000}

HEAD = """\
import json, os, sys, time, urllib.request

def ask(text="?"):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())["choices"][0]
"""


@pytest.fixture
def rig(rigs: Callable[..., GatewayRig]) -> GatewayRig:
    return rigs(lambda context, seed: "yes", max_turns=4)


@pytest.fixture
def run(rig: GatewayRig, tmp_path: Path) -> Callable[..., tuple[RolloutResult, Trajectory]]:
    """`run(code)` runs Python code as an agent; `ask(text)` is defined there. `num_files`: room for so many more."""

    def start(code: str, timeout_s: float = 60.0, num_files: int | None = None) -> tuple[RolloutResult, Trajectory]:
        file = tmp_path / "agent.py"
        file.write_text(HEAD + code)
        config = rollout_section(program=f"command:{sys.executable} {file} --option 'two words'", timeout_s=timeout_s)
        program = ServedProgram(CommandProgram(config), rig.gateway)

        async def roll_out() -> tuple[RolloutResult, Trajectory]:
            session = RolloutSession(rig.sessions, Prompt("p", (3, 9), {}), VERSION, 7, "rollout", 10.0)
            await program.start()
            shown = ProgramPrompt(prompt_id="p", token_ids=(3, 9), row=ROW, messages=[{"role": "user"}], seed=7)
            result = await program.run(shown, session)
            return result, session.finish(result.reward, result.turn_rewards)

        with nullcontext() if num_files is None else room_for_files(num_files):
            return rig.loop.run(roll_out())

    return start


def test_an_agent_gets_its_prompt_and_the_policy_and_gives_a_reward(run, monkeypatch) -> None:
    monkeypatch.setenv("ASYNC_RL_TOKEN", "secret")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.setenv("HTTP_PROXY", "http://192.0.2.1:9")
    monkeypatch.setenv("http_proxy", "http://192.0.2.1:9")
    result, trajectory = run("""
prompt = json.load(sys.stdin)
assert prompt == json.load(open(os.environ["ASYNC_RL_PROMPT"]))
assert (prompt["prompt_id"], prompt["row"]["answer"], prompt["seed"]) == ("p", "3", 7) and prompt["messages"]
assert sys.argv[1:] == ["--option", "two words"] and "ASYNC_RL_TOKEN" not in os.environ
assert "PYTHONSAFEPATH" not in os.environ and os.environ["OPENAI_API_KEY"] in os.environ["OPENAI_BASE_URL"]
print("debug output")
print(json.dumps({"reward": len(ask(prompt["row"]["question"])["message"]["content"]), "turn_rewards": [0.5]}))
print()
""")
    assert (result.reward, result.turn_rewards) == (3.0, (0.5,))
    assert (trajectory.num_turns, trajectory.status, trajectory.reward) == (1, "completed", 3.0)


def test_an_agent_that_fails_is_a_failure_with_the_end_of_its_standard_error(run) -> None:
    with pytest.raises(ProgramFailed, match=r"exit code 1; (.|\n)*KeyError: 'gone'"):
        run("ask()\nsys.stderr.write('x' * 10_000_000)\n{}['gone']")
    with pytest.raises(ProgramFailed, match="exit code 137"):
        run("ask()\nos.kill(os.getpid(), 9)")


@pytest.mark.parametrize("num_files", [0, 2])
def test_an_agent_that_cannot_be_started_is_a_failure_with_its_remedy(run, num_files: int) -> None:
    """Whether there is no room for the file with its prompt, or for its pipes."""
    run("ask()")
    too_many = r"cannot be started: .*Too many open files.*; lower rollout\.options\.max_conc"
    with pytest.raises(ProgramFailed, match=too_many):
        run("ask()", num_files=num_files)


def test_an_agent_without_room_for_its_prompt_is_a_failure(run) -> None:
    with largest_file(1000), pytest.raises(ProgramFailed, match=r"cannot be started: .*File too large"):
        run("ask()")


def test_a_flood_of_output_is_read_and_its_last_line_counts(run) -> None:
    assert run("ask()\nprint('x' * 20_000_000)\nprint('{\"reward\": 2}')")[0].reward == 2.0


def test_at_the_limit_of_turns_an_agent_that_breaks_is_truncated_not_failed(run) -> None:
    result, trajectory = run("while True: ask()")
    assert result.reward is None and (trajectory.status, trajectory.num_turns) == ("truncated", 4)


def test_at_the_time_limit_an_agent_may_end_in_its_own_way(run, rig: GatewayRig, monkeypatch) -> None:
    monkeypatch.setattr("async_rl.parts.gateway.command_program.LIMIT_GRACE_S", 60.0)
    code = "ask()\ntime.sleep(7)\nassert ask()['finish_reason'] == 'length'\nprint('{\"reward\": 1}')"
    result, trajectory = run(code, timeout_s=6.0)
    assert result.reward == 1.0 and (trajectory.status, trajectory.num_turns) == ("truncated", 1)


@pytest.mark.parametrize("last", ["time.sleep(600)", "while len(open(pids).read().split()) < 2: time.sleep(0.01)"])
def test_nothing_survives_the_time_limit_or_the_agent(run, tmp_path: Path, last: str) -> None:
    """Not even what ignores SIGTERM, has a session of its own, and is nobody's child any more."""
    pids = tmp_path / "pids"
    _, trajectory = run(
        f"""
import signal
pids = {str(pids)!r}
ask()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(pids, "a").write(f"{{os.getpid()}} ")
        time.sleep(600)
    os._exit(0)
open(pids, "a").write(f"{{os.getpid()}} ")
{last}
""",
        timeout_s=6.0 if "600" in last else 60.0,
    )
    assert trajectory.status == ("truncated" if "600" in last else "completed")
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2 and not [pid for pid in started if Path(f"/proc/{pid}").exists()]


def test_nothing_survives_a_cancelled_rollout(run, rig: GatewayRig, tmp_path: Path, eventually) -> None:
    pids = tmp_path / "pids"
    thread_error: list[BaseException] = []

    def cancelled() -> None:
        try:
            run(f"ask()\nopen({str(pids)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)")
        except BaseException as error:
            thread_error.append(error)

    thread = threading.Thread(target=cancelled)
    thread.start()
    eventually(lambda: pids.exists() and pids.read_text() != "")

    async def cancel() -> None:
        for task in asyncio.all_tasks():
            if "roll_out" in repr(task.get_coro()):
                task.cancel()

    rig.loop.run(cancel())
    thread.join(60)
    assert thread_error and not Path(f"/proc/{pids.read_text()}").exists()


def test_prompts_leave_no_files(run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run("ask()")
    assert not list(tmp_path.glob("async-rl-*"))
