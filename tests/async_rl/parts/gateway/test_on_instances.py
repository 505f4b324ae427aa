"""Agents on a real instance: the tokens that train are the instance's own, and their log-probs those of the model."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from async_rl.config.file import parse_config
from async_rl.config.pool_section import PoolSection
from async_rl.config.reward_section import RewardSection
from async_rl.method.types import Batch, Group, Prompt
from async_rl.rollouts.agents.program_rollouts import make_group_maker
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.rewards import make_reward
from async_rl.shared.event_loop import EventLoopThread
from benchmarks.common.local_producer import LocalProducer as Producer
from benchmarks.common.running_instance import launch
from tests.support.chat_tokenizer import make_chat_tokenizer
from tests.support.minimal_config import minimal_tree
from tests.support.running_instance import Instance, TrainerSide, wait_until_ready
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.distributed

TEMPERATURE = 0.8
NUM_PROMPTS = 2

AGENT = """
import json, sys
from openai import OpenAI

prompt = json.load(sys.stdin)
client = OpenAI()
tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
messages = prompt["messages"]
for number in range(3):
    asked = {"model": "m", "messages": messages, "tools": tools, "max_tokens": 12}
    if number == 1:
        chunks = list(client.chat.completions.create(**asked, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        said = {"role": "assistant", "content": text}
    else:
        said = client.chat.completions.create(**asked).choices[0].message
    messages += [said, {"role": "user", "content": f"and {number}?"}]
changed = [{"role": "user", "content": "another question"}, *messages[1:]]
client.chat.completions.create(model="m", messages=changed, max_tokens=8)
print(json.dumps({"reward": len(messages), "turn_rewards": [1, 2]}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", vocab_size=128, max_position_embeddings=2048)
    make_chat_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def instance(model: Path) -> Iterator[Instance]:
    process = launch("--model", str(model), "--port", "0")
    running = wait_until_ready(process)
    TrainerSide([running]).publish(AutoModelForCausalLM.from_pretrained(model), "v1")
    yield running
    process.kill()
    process.wait()


@pytest.fixture
def groups(loop: EventLoopThread, instance: Instance, tmp_path: Path) -> Callable[[str], list[Group]]:
    """`groups(program)`: those of a batch, whose rollouts are runs of the program."""

    def roll_out(program: str) -> list[Group]:
        pool = InferencePool(PoolSection(instances=(instance.url,), timeout_s=60))
        rollout = {"program": program, "temperature": TEMPERATURE, "options": {"renderer": "qwen3", "timeout_s": 120}}
        tree = minimal_tree() | {"rollout": {"responses_per_prompt": 2, "max_response_tokens": 64, **rollout}}
        tokenizer: Any = make_chat_tokenizer(tmp_path / "tokenizer")
        maker = make_group_maker(parse_config(tree, "here"), pool, tokenizer, make_reward(RewardSection()))
        loop.run(pool.wait_until_ready())
        loop.run(pool.begin_publish())
        loop.run(pool.end_publish("v1", (instance.url,)))
        producer = Producer(maker, loop)
        found: list[Group] = []
        try:
            texts = {i: f"question {i}" for i in range(NUM_PROMPTS)}
            batch = Batch(0, {i: Prompt(str(i), (20, 68, i), {"prompt": text}) for i, text in texts.items()})
            with producer.start(batch, "v1") as run:
                while ready := run.ready(wait=True):
                    found += ready
        finally:
            producer.close()
            loop.run(pool.close())
        return sorted(found, key=lambda group: group.index)

    return roll_out


def tokens(groups: list[Group]) -> list[Any]:
    return [[(r.prompt_ids, r.token_ids, r.observed) for r in group.responses] for group in groups]


@pytest.mark.nightly
def test_a_black_box_agent_trains_the_tokens_that_were_sampled(groups, model: Path, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    program = f"command:{sys.executable} {tmp_path / 'agent.py'}"
    found = groups(program)
    assert [group.rewards for group in found] == [(7.0, 7.0)] * NUM_PROMPTS
    for group in found:
        assert [facts.num_turns for facts in group.rollouts] == [4, 4]
        # The three turns are one sequence, the changed history is another one.
        assert [facts.num_responses for facts in group.rollouts] == [2, 2]
        assert all(response.weight_versions == {"v1"} for response in group.responses)
        assert group.rollouts[0].turn_rewards == (1.0, 2.0)
    assert_logprobs(found, model)
    # The same processes get the same turns, whenever each of them asks.
    assert tokens(groups(program)) == tokens(found)


def assert_logprobs(groups: list[Group], path: Path) -> None:
    """Of each sampled token, against one pass of transformers over its sequence."""
    model = AutoModelForCausalLM.from_pretrained(path)
    for group in groups:
        for response in group.responses:
            before = group.prompt.token_ids if response.prompt_ids is None else response.prompt_ids
            with torch.no_grad():
                logits = model(torch.tensor([[*before, *response.token_ids]])).logits[0].double() / TEMPERATURE
            rows = torch.log_softmax(logits, dim=-1)
            expected = [rows[len(before) + i - 1, response.token_ids[i]].item() for i in response.sampled]
            # Rounding of float32, through two layers.
            torch.testing.assert_close(list(response.logprobs), expected, atol=2e-4, rtol=0)


PYTHON_PROGRAM = '''
import asyncio
from openai import AsyncOpenAI

async def rollout(prompt, policy):
    """One turn by the policy, and one by an OpenAI client: both of the same rollout."""
    turn = await policy.generate(prompt.messages, max_tokens=8)
    async with AsyncOpenAI(base_url=prompt.base_url, api_key=prompt.api_key) as client:
        messages = [*prompt.messages, turn.message, {"role": "user", "content": "and?"}]
        await client.chat.completions.create(model="m", messages=messages, max_tokens=8)
    return 1.0
'''


def test_a_python_program_may_use_openais_client_for_its_rollout(groups, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PYTHON_PROGRAM)
    for group in groups(f"python:{tmp_path / 'program.py'}:rollout"):
        assert [(facts.num_turns, facts.num_responses) for facts in group.rollouts] == [(2, 1), (2, 1)]
