"""Groups whose rollouts are runs of a program: exactly G of each prompt, whatever the programs do."""

import gc
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from async_rl.config.prompts_section import PromptsSection
from async_rl.config.reward_section import RewardSection
from async_rl.errors import ConfigError, NoInstanceLeft, RolloutFailed, WriteFailed
from async_rl.method.types import Batch, Group, Prompt
from async_rl.rollouts.agents import program_rollouts
from async_rl.rollouts.agents.program_rollouts import make_program_rollouts
from async_rl.rollouts.agents.worker_programs import WorkerProgram
from async_rl.rollouts.rewards import make_reward
from async_rl.shared.event_loop import EventLoopThread
from benchmarks.common.local_producer import LocalProducer as Producer
from tests.support.chat_tokenizer import make_chat_tokenizer
from tests.support.rollout_settings import rollout_section
from tests.support.scripted_pool import ScriptedPool
from tests.support.waiting import wait_for

pytestmark = pytest.mark.distributed

PROGRAM = """
import asyncio, os, random
from pathlib import Path

async def rollout(prompt, policy):
    chance = random.Random(prompt.seed)
    messages = list(prompt.messages)
    for _ in range(chance.randrange(1, 4)):
        turn = await policy.generate(messages)
        messages += [turn.message, {"role": "user", "content": "and"}]
    fault = prompt.row.get("fault")
    if fault == "always":
        raise KeyError("broken tool")
    if fault is not None and fault != "unrewarded":
        marker = Path(fault)
        number = len(list(marker.parent.glob(marker.name + "*")))
        if number < 2:
            Path(f"{fault}{number}").touch()
            if number:
                os._exit(9)
            raise KeyError("broken service")
    if prompt.row.get("late"):
        await asyncio.sleep(3600)
    if prompt.row.get("silent"):
        return None
    return len(turn.text) / 10

async def says_nothing(prompt, policy):
    return 1.0
"""

REWARD = "def score(prompt, responses, row): return [100.0 + len(response.text) for response in responses]"


@dataclass
class Rig:
    """A producer of program rollouts at a scripted policy."""

    loop: EventLoopThread
    tokenizer: Any
    directory: Path
    pool: ScriptedPool
    producers: list[Producer]

    def make(
        self,
        function: str = "rollout",
        reward: bool = False,
        parts: tuple[dict[str, Any], ...] = (),
        on_figures: Callable[[Mapping[str, Any]], None] = lambda figures: None,
        **settings: Any,
    ) -> Producer:
        program = f"python:{self.directory / 'program.py'}:{function}"
        rollout = rollout_section(
            **(
                {"responses_per_prompt": 4, "max_response_tokens": 200, "program": program, "renderer": "template"}
                | settings
            )
        )
        name = f"python:{self.directory / 'reward.py'}:score" if reward else None
        scores = make_reward(RewardSection.model_validate({"name": name, "parts": parts}))
        pool: Any = self.pool
        prompts = PromptsSection(source="x.jsonl", prompts_per_batch=1)
        programs = make_program_rollouts(
            *(rollout, prompts, 1, "a model", pool, self.tokenizer, scores),
            program=WorkerProgram(rollout),
        )
        producer = Producer(programs, self.loop, on_figures=on_figures)
        self.producers.append(producer)
        return producer

    def groups(self, producer: Producer, rows: list[dict[str, Any]]) -> list[Group]:
        prompts = {i: Prompt(f"row{i}", (20, 68, i), {"prompt": f"question {i}", **row}) for i, row in enumerate(rows)}
        groups: list[Group] = []
        with producer.start(Batch(0, prompts), "v1") as run:
            while ready := run.ready(wait=True):
                groups += ready
        return sorted(groups, key=lambda group: group.index)


@pytest.fixture
def rig(loop: EventLoopThread, tiny_model: Callable[..., Path], tmp_path: Path) -> Iterator[Rig]:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "reward.py").write_text(REWARD)
    rig = Rig(loop, AutoTokenizer.from_pretrained(tiny_model()), tmp_path, ScriptedPool(), [])
    yield rig
    for producer in rig.producers:
        producer.close()


def test_every_prompt_gives_exactly_its_rollouts(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    groups = rig.groups(rig.make(), [{}] * 6)
    assert [group.index for group in groups] == list(range(6))
    for group in groups:
        assert len(group.rewards) == len(group.rollouts) == 4 and group.attempts == 1
        assert group.num_response_tokens == sum(len(response.logprobs) for response in group.responses)
    turns = [facts.num_turns for group in groups for facts in group.rollouts]
    assert {1, 2, 3} == set(turns) and len(rig.pool.asked) == sum(turns)
    report = next(text for text in caplog.messages if text.startswith("rollouts: {'iteration': 0"))
    assert "'num_rollouts': 24" in report and f"'turns_max': {max(turns)}" in report


def test_figures_that_cannot_be_written_are_reported_and_end_nothing(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(figures: Mapping[str, Any]) -> None:
        raise WriteFailed("cannot write 'rollouts.jsonl': no room")

    with rig.make(on_figures=refuse).start(Batch(5, {0: Prompt("row0", (20, 68, 0), {"prompt": "q"})}), "v1") as run:
        assert len(run.ready(wait=True)) == 1
        wait_for(lambda: "of iteration 5 are not recorded: cannot write 'rollouts.jsonl'" in caplog.text)


def test_the_same_run_makes_the_same_groups(rig: Rig) -> None:
    def content(groups: list[Group]) -> list[Any]:
        return [(group.index, group.rewards, [r.token_ids for r in group.responses]) for group in groups]

    once = content(rig.groups(rig.make(), [{}] * 3))
    rig.pool.delay_s = 0.01
    assert content(rig.groups(rig.make(num_workers=2, max_concurrent=3), [{}] * 3)) == once


def test_faults_of_a_program_are_repeated_with_the_same_turns(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_rollouts, "RETRY_PAUSE_S", 0.01)
    whole = rig.groups(rig.make(), [{}] * 3)
    num_asked = len(rig.pool.asked)
    groups = rig.groups(rig.make(), [{}, {"fault": str(rig.directory / "fault")}, {}])
    assert [group.rewards for group in groups] == [group.rewards for group in whole]
    assert [r.token_ids for g in groups for r in g.responses] == [r.token_ids for g in whole for r in g.responses]
    assert sum(group.attempts - 1 for group in groups) >= 2
    num_sampled = len(rig.pool.asked) - rig.pool.num_cancelled
    assert num_sampled == 2 * num_asked, "what was sampled is not sampled again"


def test_the_pause_before_another_attempt_grows_to_half_a_minute() -> None:
    pauses = [program_rollouts.pause_before(attempt) for attempt in (1, 2, 3, 7, 8, 100, 5000)]
    assert pauses == [0.5, 1.0, 2.0, 30.0, 30.0, 30.0, 30.0]


def test_a_program_that_always_fails_ends_the_batch_by_name(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_rollouts, "RETRY_PAUSE_S", 0.01)
    message = r"(?s)rollout \d of prompt 'row1', index 1 of iteration 0, attempt 2 of 2 failed:.*broken tool"
    with pytest.raises(RolloutFailed, match=message) as caught:
        rig.groups(rig.make(max_attempts=2), [{}, {"fault": "always"}, {"late": True}])
    assert re.search(r'File ".*program.py", line', str(caught.value))


def test_a_program_that_never_asks_is_a_failure_and_not_a_rollout(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_rollouts, "RETRY_PAUSE_S", 0.01)
    with pytest.raises(RolloutFailed, match="before a turn was generated"):
        rig.groups(rig.make("says_nothing"), [{}])


@pytest.mark.parametrize("reward", [True, False])
def test_limits_are_outcomes_with_a_reward(rig: Rig, reward: bool) -> None:
    (group,) = rig.groups(rig.make(reward=reward, timeout_s=1.0), [{"late": True}])
    assert [facts.status for facts in group.rollouts] == ["truncated"] * 4
    assert all(value >= 100 if reward else value == 0.0 for value in group.rewards)


def test_the_reward_sees_the_last_turn_and_scores_where_the_program_does_not(rig: Rig) -> None:
    own, scored = rig.groups(rig.make(reward=True), [{}, {"silent": True}])
    assert max(own.rewards) < 100
    ends = [
        i
        for i, (this, following) in enumerate(zip(scored.rollout_of, [*scored.rollout_of[1:], None], strict=True))
        if this != following
    ]
    assert len(scored.rewards) == len(ends) == 4
    assert min(scored.rewards) > 100 and max(scored.rewards) <= 100 + 8, "eight letters a turn at most"


def test_a_group_has_the_parts_of_a_reward_that_scored_all_of_it(rig: Rig) -> None:
    mine = {"name": f"python:{rig.directory / 'reward.py'}:score", "label": "mine", "weight": 2.0}
    own, scored = rig.groups(
        rig.make(parts=(mine, {"name": "regex", "options": {"pattern": ".*"}})), [{}, {"silent": True}]
    )
    assert own.reward_parts == () and max(own.rewards) < 100
    parts = dict(scored.reward_parts)
    assert list(parts) == ["mine", "regex"] and parts["regex"] == (1.0,) * 4
    assert scored.rewards == tuple(2 * reward + 1 for reward in parts["mine"])


def test_no_reward_at_all_is_a_named_error(rig: Rig) -> None:
    with pytest.raises(RolloutFailed, match=r"returned no reward, and no reward\.name is set"):
        rig.groups(rig.make(), [{"silent": True}])


def test_a_failing_pool_ends_the_batch(rig: Rig) -> None:
    rig.pool.error = NoInstanceLeft("all gone")
    with pytest.raises(NoInstanceLeft):
        rig.groups(rig.make(), [{}] * 3)


def test_leaving_a_batch_ends_its_programs_and_the_next_one_runs(rig: Rig) -> None:
    producer = rig.make()
    prompt = Prompt("row0", (20, 68), {"prompt": "question", "late": True})
    with pytest.raises(ValueError), producer.start(Batch(0, {0: prompt}), "v1"):
        raise ValueError
    assert len(rig.groups(producer, [{}])) == 1


def test_at_most_so_many_run_at_once(rig: Rig) -> None:
    rig.pool.delay_s = 0.02
    running, most = 0, 0
    generate = rig.pool.generate_group

    async def counted(*arguments: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await generate(*arguments)
        finally:
            running -= 1

    rig.pool.generate_group = counted  # type: ignore[method-assign]
    rig.groups(rig.make(max_concurrent=3), [{}] * 4)
    assert most == 3


DIES_AT_SOME_STARTS = """
import os
from pathlib import Path

starts = Path(__file__).parent / "starts"
starts.mkdir(exist_ok=True)
number = len(list(starts.iterdir()))
(starts / str(number)).touch()
if number in (0, 2, 3):
    os.kill(os.getpid(), 9)
"""


def test_a_process_that_ends_while_it_loads_is_started_again(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """As a machine without memory kills it: at the start of the run, and when it replaces one that has ended."""
    (rig.directory / "program.py").write_text(DIES_AT_SOME_STARTS + PROGRAM)
    (group,) = rig.groups(rig.make(), [{"fault": str(rig.directory / "fault")}])
    assert len(group.rewards) == 4 and len(list((rig.directory / "starts").iterdir())) == 5
    assert caplog.text.count("to load it: its process ended with exit code -9") == 3
    (rig.directory / "program.py").write_text("import os\nos._exit(4)\n")
    with pytest.raises(ConfigError, match="cannot be loaded:\nits process ended with exit code 4"):
        rig.make()


def test_a_batch_that_ends_early_leaves_no_error_of_its_rollouts(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """They fail as they are cancelled, when nobody awaits them any more."""
    producer = rig.make()
    rig.pool.delay_s = 0.5
    with producer.start(Batch(0, {0: Prompt("row0", (20, 68), {"prompt": "q"})}), "v1") as run:
        assert not run.ready(wait=False)
        time.sleep(0.3)
    time.sleep(0.3)
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_program_that_cannot_be_loaded_is_named_at_the_start(rig: Rig) -> None:
    with pytest.raises(ConfigError, match="has no function 'rolout'"):
        rig.make("rolout")
    with pytest.raises(ConfigError, match="no such file"):
        rig.make(program="python:nowhere.py:rollout")


def test_the_documents_environment_runs(rig: Rig, tmp_path: Path) -> None:
    guide = (Path(__file__).parents[4] / "docs" / "rollouts.md").read_text()
    (tmp_path / "environment.py").write_text(guide.partition("```python\n")[2].partition("```")[0])
    tokenizer = make_chat_tokenizer(tmp_path / "tokenizer")
    rig.tokenizer = tokenizer

    def says(context: Any, seed: int) -> Any:
        told = tokenizer.decode(context)
        call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
        text = "It is 42." if "<tool_response>\n42\n</tool_response>" in told else call
        return tokenizer([f"{text}<|im_end|>"], add_special_tokens=False)["input_ids"][0]

    rig.pool.says = says
    program = f"python:{tmp_path / 'environment.py'}:rollout"
    (group,) = rig.groups(rig.make(program=program, renderer="qwen3"), [{"answer": "42"}])
    assert group.rewards == (1.0,) * 4
    assert {(facts.num_turns, facts.num_responses) for facts in group.rollouts} == {(2, 1)}
    (tool,) = group.responses[0].observed[-1:]
    assert "42" in tokenizer.decode(group.responses[0].token_ids[slice(*tool)])
