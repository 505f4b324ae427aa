"""Agent frameworks as their users start them: real processes in an environment of their own (`make test-agents`)."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from async_rl.method.types import Prompt
from async_rl.parts.gateway.command_program import CommandProgram
from async_rl.parts.gateway.programs import ServedProgram
from async_rl.rollouts.agents.program import ProgramPrompt, RolloutResult
from async_rl.rollouts.agents.session import RolloutSession
from async_rl.rollouts.groups.trajectory import Trajectory
from tests.support.gateway_rig import VERSION, GatewayRig
from tests.support.rollout_settings import rollout_section

pytestmark = [pytest.mark.agents, pytest.mark.distributed]

PYTHON = Path(os.environ.get("ASYNC_RL_AGENTS_PYTHON", ".venv-agents/bin/python"))

OPENAI_AGENTS = """
import json
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_tracing_disabled(True)
if %r:
    set_default_openai_api("chat_completions")


@function_tool
def add(a: int, b: int) -> int:
    '''The sum of two numbers.'''
    return a + b


question = json.load(sys.stdin)["row"]["question"]
agent = Agent(name="calculator", instructions="Use the tool.", tools=[add], model="policy")
STREAMED = %s
if STREAMED:
    import asyncio

    async def main():
        result = Runner.run_streamed(agent, question)
        async for _ in result.stream_events():
            pass
        return result

    result = asyncio.run(main())
else:
    result = Runner.run_sync(agent, question)
print(json.dumps({"reward": float("3" in result.final_output)}))
"""


def calculator(context: str, seed: int) -> str:
    if "<|im_start|>tool\n3" in context:
        return "it is 3"
    return 'let me see<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def run_agent(rig: GatewayRig, code: str, folder: Path) -> tuple[RolloutResult, Trajectory]:
    (folder / "agent.py").write_text(code)
    config = rollout_section(program=f"command:{PYTHON} {folder / 'agent.py'}", timeout_s=120)
    program = ServedProgram(CommandProgram(config), rig.gateway)

    async def roll_out() -> tuple[RolloutResult, Trajectory]:
        session = RolloutSession(rig.sessions, Prompt("p", (3, 9), {}), VERSION, 7, "rollout", 10.0)
        shown = ProgramPrompt(prompt_id="p", token_ids=(3, 9), row={"question": "1 + 2?"})
        result = await program.run(shown, session)
        return result, session.finish(result.reward)

    return rig.loop.run(roll_out())


# By default it takes the Responses API.
@pytest.mark.parametrize("chat", [False, True], ids=["responses", "chat"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_an_agent_of_openai_agents_is_one_sequence_of_two_turns(
    rigs: Callable[..., GatewayRig], tmp_path: Path, streamed: bool, chat: bool
) -> None:
    result, trajectory = run_agent(rigs(calculator), OPENAI_AGENTS % (chat, streamed), tmp_path)
    assert result.reward == 1.0
    assert (trajectory.num_turns, len(trajectory.responses), trajectory.status) == (2, 1, "completed")


@pytest.mark.parametrize("chat, streamed", [(False, False), (False, True), (True, False)])
def test_at_the_limit_of_turns_its_run_ends_with_a_reward(
    rigs: Callable[..., GatewayRig], tmp_path: Path, chat: bool, streamed: bool
) -> None:
    result, trajectory = run_agent(rigs(calculator, max_turns=1), OPENAI_AGENTS % (chat, streamed), tmp_path)
    assert result.reward == 0.0
    assert (trajectory.num_turns, trajectory.status) == (1, "truncated")
