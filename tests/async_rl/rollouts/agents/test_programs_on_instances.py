"""Rollout programs on real instances: tokens and log-probs are exact, and an instance that is lost changes neither."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from async_rl.config.pool_section import PoolSection
from async_rl.config.prompts_section import PromptsSection
from async_rl.config.reward_section import RewardSection
from async_rl.method.types import Batch, Group, Prompt
from async_rl.rollouts.agents.program_rollouts import make_program_rollouts
from async_rl.rollouts.agents.worker_programs import WorkerProgram
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.rewards import make_reward
from async_rl.shared.event_loop import EventLoopThread
from benchmarks.common.local_producer import LocalProducer as Producer
from benchmarks.common.running_instance import launch
from tests.support.chat_tokenizer import make_chat_tokenizer
from tests.support.rollout_settings import rollout_section
from tests.support.running_instance import Instance, TrainerSide, wait_until_ready
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.distributed

PROGRAM = '''
import asyncio

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

async def rollout(prompt, policy):
    """Three turns with a tool's answers between them, and one that changes the first message: a branch."""
    messages = list(prompt.messages)
    for number in range(3):
        turn = await policy.generate(messages, tools=TOOLS, max_tokens=12)
        messages += [turn.message, {"role": "tool", "content": f"result {number}", "tool_call_id": f"call {number}"}]
        await asyncio.sleep(0.1)
    await policy.generate([{"role": "user", "content": "another question"}, *messages[1:]], max_tokens=8)
    return float(len(turn.text))
'''


@dataclass
class Rig:
    loop: EventLoopThread
    model: Path
    tokenizer: Any
    program: str

    def groups(self, instances: list[Instance], during: Callable[[], None] = lambda: None) -> list[Group]:
        """The groups of a batch of four prompts at these instances."""
        urls = tuple(instance.url for instance in instances)
        pool = InferencePool(PoolSection(instances=urls, timeout_s=60))
        rollout = rollout_section(
            responses_per_prompt=4, max_response_tokens=64, program=self.program, renderer="qwen3", num_workers=2
        )
        reward = make_reward(RewardSection())
        prompts = PromptsSection(source="x.jsonl", prompts_per_batch=4)
        programs = make_program_rollouts(
            *(rollout, prompts, 3, "m", pool, self.tokenizer, reward),
            program=WorkerProgram(rollout),
        )
        self.loop.run(pool.wait_until_ready())
        self.loop.run(pool.begin_publish())
        self.loop.run(pool.end_publish("v1", urls))
        producer = Producer(programs, self.loop)
        groups: list[Group] = []
        try:
            texts = {i: f"question {i}" for i in range(4)}
            batch = Batch(0, {i: Prompt(str(i), (20, 68, i), {"prompt": text}) for i, text in texts.items()})
            with producer.start(batch, "v1") as run:
                during()
                while ready := run.ready(wait=True):
                    groups += ready
        finally:
            producer.close()
            self.loop.run(pool.close())
        return sorted(groups, key=lambda group: group.index)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", vocab_size=128, max_position_embeddings=2048)
    make_chat_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def instances(model: Path) -> Iterator[list[Instance]]:
    """Three instances with version v1 of the model."""
    processes = [launch("--model", str(model), "--port", "0") for _ in range(3)]
    running = [wait_until_ready(process) for process in processes]
    TrainerSide(running).publish(AutoModelForCausalLM.from_pretrained(model), "v1")
    yield running
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def rig(loop: EventLoopThread, model: Path, tmp_path: Path) -> Rig:
    (tmp_path / "program.py").write_text(PROGRAM)
    tokenizer = make_chat_tokenizer(tmp_path / "tokenizer")
    return Rig(loop, model, tokenizer, f"python:{tmp_path / 'program.py'}:rollout")


def content(groups: list[Group]) -> list[Any]:
    return [
        (group.index, group.rewards, [(r.prompt_ids, r.token_ids, r.observed, r.logprobs) for r in group.responses])
        for group in groups
    ]


def test_turns_of_programs_are_exact_whatever_instance_is_lost(rig: Rig, instances: list[Instance]) -> None:
    first = rig.groups(instances[:1])
    assert [len(group.rollouts) for group in first] == [4] * 4
    assert all(facts.num_turns == 4 for group in first for facts in group.rollouts)
    # Three turns on one another, if none of them was cut in a way that its template cannot continue, and the branch.
    assert all(facts.num_responses == 2 for group in first for facts in group.rollouts)
    assert_log_probs(rig, first)

    def kill_one_amid_the_batch() -> None:
        def kill() -> None:
            time.sleep(0.6)
            instances[1].process.kill()

        threading.Thread(target=kill, daemon=True).start()

    disturbed = rig.groups(instances, kill_one_amid_the_batch)
    assert [each[:2] for each in content(disturbed)] == [each[:2] for each in content(first)]
    for one, other in zip(content(first), content(disturbed), strict=True):
        assert [r[:3] for r in one[2]] == [r[:3] for r in other[2]]


def assert_log_probs(rig: Rig, groups: list[Group]) -> None:
    """Those of every labelled token, from a plain forward pass over its sequence."""
    reference = AutoModelForCausalLM.from_pretrained(rig.model)
    for group in groups:
        for response in group.responses:
            base = group.prompt.token_ids if response.prompt_ids is None else response.prompt_ids
            with torch.no_grad():
                logits = reference(torch.tensor([[*base, *response.token_ids]])).logits[0].double()
            logprobs = logits.log_softmax(-1)
            expected = [logprobs[len(base) + i - 1, response.token_ids[i]].item() for i in response.sampled]
            assert response.logprobs == pytest.approx(expected, abs=1e-4)
