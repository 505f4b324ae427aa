"""Environments of verifiers, in an environment of its own (`make test-agents`): episodes, their faults, a whole run."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rl.method.types import Prompt
from async_rl.parts.gateway.programs import ServedProgram
from async_rl.rollouts.agents.program import ProgramFailed, ProgramPrompt, RolloutResult
from async_rl.rollouts.agents.session import RolloutSession
from async_rl.rollouts.agents.worker_programs import WorkerProgram
from async_rl.rollouts.groups.trajectory import Trajectory
from async_rl.shared.event_loop import EventLoopThread
from tests.support import ROOT
from tests.support.agent_tokenizer import VOCAB_SIZE, make_agent_tokenizer
from tests.support.gateway_rig import VERSION, GatewayRig, gateway_rig
from tests.support.parts import needs_part
from tests.support.tiny_model import make_tiny_model
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.agents, pytest.mark.distributed, needs_part("environments")]

PYTHON = os.environ.get("ASYNC_RL_VERIFIERS_PYTHON", str(ROOT / ".venv-verifiers/bin/python"))
EXAMPLE = ROOT / "examples" / "verifiers"

SEVERAL = '''
import httpx
import verifiers.v1 as vf

__all__ = ["Several", "Talk", "Players"]


class Data(vf.TaskData):
    turns: int = 1
    fault: str = ""


class Task(vf.Task[Data]):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        if self.data.fault == "scoring":
            raise KeyError("no such answer")
        return len(trace.last_reply) + trace.num_turns / 10


class Several(vf.Taskset[Task, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            number += 1
            yield Task(Data(prompt=f"number {number}?", system_prompt="count", turns=number), self.config.task)


class Talk(vf.Harness[vf.HarnessConfig]):
    """Talks in the process of verifiers."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        if data.fault == "process":
            return await runtime.run(["sh", "-c", "sleep 987654"], {})
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=60) as client:
            for _ in range(data.turns):
                body = {"model": ctx.model, "messages": messages}
                response = await client.post(f"{endpoint}/chat/completions", json=body)
                response.raise_for_status()
                said = response.json()["choices"][0]["message"]["content"]
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "on"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class PlayersConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class Players(vf.Env[PlayersConfig]):
    async def run(self, task, agents):
        await agents.first.run(task)
        if task.data.fault == "two agents":
            await agents.second.run(task)
'''

AGENT = 'harness.id = "several"\nruntime.type = "subprocess"'
CONFIG = f'[env.taskset]\nid = "several"\n[env.first]\n{AGENT}\n[env.second]\n{AGENT}\n'

PLAY = f"""
from async_rl.parts.environments.verifiers import VerifiersEnvironment

environment = VerifiersEnvironment("CONFIG", {PYTHON!r})


async def rollout(prompt, policy):
    return await environment.play(prompt)
"""


@dataclass
class Stage:
    """A program of an environment, with a gateway and a policy behind it."""

    rig: GatewayRig
    program: ServedProgram
    config: Path

    def services(self) -> list[psutil.Process]:
        return descendants(str(self.config))

    def play(self, **task: Any) -> tuple[RolloutResult, Trajectory]:
        return self.play_all(task)[0]

    def play_all(self, *tasks: dict[str, Any], within_s: float = 150.0) -> list[tuple[RolloutResult, Trajectory]]:
        async def play_all() -> list[tuple[RolloutResult, Trajectory]]:
            async with asyncio.timeout(within_s):
                return await asyncio.gather(*map(self._play, tasks))

        return self.rig.loop.run(play_all())

    async def _play(self, task: dict[str, Any]) -> tuple[RolloutResult, Trajectory]:
        session = RolloutSession(self.rig.sessions, Prompt("p", (3, 9), {}), VERSION, 7, "rollout", 10.0)
        row = {"prompt": "?", "task": {"prompt": "number?", **task}}
        result = await self.program.run(ProgramPrompt(prompt_id="p", token_ids=(3, 9), row=row), session)
        return result, session.finish(result.reward)


@contextmanager
def stage_of(folder: Path, config: str, say: Callable[[str, int], str]) -> Iterator[Stage]:
    loop = EventLoopThread()
    (folder / "several.py").write_text(SEVERAL)
    (folder / "env.toml").write_text(config)
    (folder / "play.py").write_text(PLAY.replace("CONFIG", str(folder / "env.toml")))
    try:
        with gateway_rig(loop, say, program=f"python:{folder / 'play.py'}:rollout", max_turns=4, timeout_s=150) as rig:
            program = ServedProgram(WorkerProgram(rig.config), rig.gateway)
            loop.run(program.start())
            yield Stage(rig, program, folder / "env.toml")
            loop.run(program.close())
    finally:
        loop.close()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage_of(tmp_path_factory.mktemp("several"), CONFIG, lambda context, seed: "yes") as stage:
        yield stage


def descendants(word: str) -> list[psutil.Process]:
    """The living processes that this test's process has started, directly or not, with `word` in their first words."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if any(word in each for each in process.cmdline()[:4]):
                found.append(process)
    return found


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_episodes_at_once_are_rollouts_of_one_process_each_with_its_own_turns_and_reward(stage: Stage) -> None:
    played = stage.play_all(*({"turns": 1 + number % 3} for number in range(24)))
    for number, (result, trajectory) in enumerate(played):
        num_turns = 1 + number % 3
        assert result.reward == trajectory.reward == pytest.approx(len("yes") + num_turns / 10)
        assert (trajectory.num_turns, len(trajectory.responses), trajectory.status) == (num_turns, 1, "completed")
    assert len(stage.services()) == 1


def test_an_episode_that_cannot_be_scored_failed_and_says_why(stage: Stage) -> None:
    with pytest.raises(ProgramFailed, match=r"no such answer"):
        stage.play(fault="scoring")


def test_an_agent_that_fails_at_a_limit_of_its_rollout_is_truncated(stage: Stage) -> None:
    result, trajectory = stage.play(turns=100)
    assert (result.reward, trajectory.num_turns, trajectory.status) == (None, 4, "truncated")


def test_a_rollout_with_two_agents_that_are_the_policy_is_refused(stage: Stage) -> None:
    with pytest.raises(ProgramFailed, match=r"2 runs of agents talked to the policy: first, second; expected one"):
        stage.play(fault="two agents")


def test_a_row_of_another_task_is_named(stage: Stage) -> None:
    with pytest.raises(ProgramFailed, match=r"turns\n.*valid integer"):
        stage.play(turns="many")


def test_a_rollout_that_is_cancelled_leaves_no_process_of_its_agent(stage: Stage) -> None:
    stage.play()
    with pytest.raises(TimeoutError):
        stage.play_all({"fault": "process"}, within_s=5.0)
    wait_for(lambda: not descendants("987654"))
    assert stage.play()[0].reward == pytest.approx(3.1)


def test_a_process_that_is_lost_fails_its_rollouts_and_another_one_plays_the_next(stage: Stage) -> None:
    stage.play()
    (service,) = stage.services()
    threading.Timer(2.0, service.kill).start()
    with pytest.raises(ProgramFailed, match=r"the process of .*env.toml failed"):
        stage.play(fault="process")
    wait_for(lambda: not is_alive(service.pid))
    assert stage.play()[0].reward == pytest.approx(3.1)
    assert [each.pid for each in stage.services()] != [service.pid]


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        (CONFIG.replace('"several"', '"nobody"', 1), "taskset 'nobody' not found"),
        (CONFIG.replace("[env.second]", "retries.max_retries = 1\n[env.second]"), r"env\.first\.retries is set"),
        ("[env", "TOMLDecodeError"),
    ],
)
def test_a_config_that_cannot_be_served_is_an_error_that_all_its_rollouts_share(
    tmp_path: Path, config: str, fault: str
) -> None:
    with stage_of(tmp_path, config, lambda context, seed: "yes") as stage:
        with pytest.raises(ProgramFailed, match=f"cannot serve the environment of .*{fault}"):
            stage.play_all({}, {}, {})
        assert not stage.services()


def rows_of(config: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [
        sys.executable,
        "-m",
        "async_rl.parts.environments.verifiers_rows",
        str(config),
        "--python",
        PYTHON,
        *words,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=150)


def test_tasks_are_rows_whose_prompt_has_the_system_prompt(tmp_path: Path) -> None:
    (tmp_path / "several.py").write_text(SEVERAL)
    (tmp_path / "env.toml").write_text(CONFIG)
    done = rows_of(tmp_path / "env.toml", "--limit", "2")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows[1] == {
        "prompt": [{"role": "system", "content": "count"}, {"role": "user", "content": "number 2?"}],
        "task": {"idx": 1, "prompt": "number 2?", "system_prompt": "count", "turns": 2},
    }
    assert len(rows) == 2
    endless = rows_of(tmp_path / "env.toml")
    assert endless.returncode == 1 and "Several is infinite: give a limit" in endless.stderr


def calculator(context: str, seed: int) -> str:
    if "<|im_start|>tool\n4753" in context:
        return "it is 4753"
    return '<tool_call>{"name": "multiply", "arguments": {"a": 49, "b": 97}}</tool_call>'


def test_a_harness_of_verifiers_with_a_tool_is_one_sequence_of_two_turns(tmp_path: Path) -> None:
    """And nothing of it is left after the program's end."""
    shutil.copy(EXAMPLE / "products.py", tmp_path)
    with stage_of(tmp_path, (EXAMPLE / "env.toml").read_text(), calculator) as stage:
        result, trajectory = stage.play(prompt="What is 49 * 97?", answer=4753)
        assert result.reward == 1.0
        assert (trajectory.num_turns, len(trajectory.responses), trajectory.status) == (2, 1, "completed")
        (service,) = stage.services()
        left = [service.pid, *(each.pid for each in service.children(recursive=True))]
        (folder,) = (Path(word).parent for word in service.cmdline() if word.endswith("/socket"))
        assert len(left) > 1 and folder.exists()
    wait_for(lambda: not any(map(is_alive, left)))


def test_the_rows_of_the_example_are_its_tasks() -> None:
    done = rows_of(EXAMPLE / "env.toml")
    assert done.stdout == (EXAMPLE / "rows.jsonl").read_text(), done.stderr


def test_a_run_is_trained_on_episodes(tmp_path: Path) -> None:
    folder = tmp_path / "verifiers"
    shutil.copytree(EXAMPLE, folder)
    model = make_tiny_model(folder / "model", "qwen3", tied=True, vocab_size=VOCAB_SIZE, max_position_embeddings=1024)
    make_agent_tokenizer().save_pretrained(model)
    small = ["--train.iterations=2", "--prompts.prompts_per_batch=2", "--rollout.responses_per_prompt=2"]
    short = ["--rollout.max_response_tokens=32", "--rollout.options.renderer=template", "--model.dtype=float32"]
    done = subprocess.run(
        [sys.executable, "-m", "deploy.local.run", "run.toml", *small, *short],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "VERIFIERS_PYTHON": PYTHON},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    proofs = [json.loads(line) for line in (folder / "runs" / "verifiers" / "ledger.jsonl").read_text().splitlines()]
    assert [proof["on_policy"] for proof in proofs] == [True] * 2
    assert all(proof["num_turns"] >= 4 and proof["num_branches"] == 0 for proof in proofs)
