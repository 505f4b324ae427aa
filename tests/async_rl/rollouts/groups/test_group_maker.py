"""Which maker of groups a run has, and how each samples and scores a prompt of an evaluation set."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from async_rl.config.evaluation_section import EvaluationSet
from async_rl.config.file import parse_config
from async_rl.config.prompts_section import PromptsSection
from async_rl.config.reward_section import RewardSection
from async_rl.errors import RolloutFailed
from async_rl.evaluation.evaluator import ScoredPrompt
from async_rl.method.seeds import RESPONSE_BITS, evaluation_seed
from async_rl.method.types import Prompt, Response, Scores
from async_rl.rollouts.agents.program import ProgramFailed, ProgramPrompt, RolloutResult
from async_rl.rollouts.agents.program_rollouts import ProgramGroupMaker, make_group_maker, make_program_rollouts
from async_rl.rollouts.agents.session import RolloutSession
from async_rl.rollouts.groups.group_maker import GroupMaker, SingleTurns
from async_rl.rollouts.rewards import make_reward
from async_rl.shared.protocol.inference import SamplingParams
from tests.support.groups import make_response
from tests.support.minimal_config import minimal_tree
from tests.support.parts import needs_part
from tests.support.rollout_settings import rollout_section
from tests.support.scripted_pool import ScriptedPool

PROMPT = Prompt("7", (3, 4), {"answer": 1})


class Pool:
    """Answers with a response for each that is asked for, of which the first was cut."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], SamplingParams, str, str]] = []

    async def generate_group(
        self, prompt: tuple[int, ...], sampling: SamplingParams, request_id: str, version: str
    ) -> tuple[list[Response], int]:
        self.asked.append((prompt, sampling, request_id, version))
        reasons = ["length", *["stop"] * (sampling.n - 1)]
        return [make_response((5, i), finish_reason=reason) for i, reason in enumerate(reasons)], 1


class Tokenizer:
    def __init__(self) -> None:
        self.skipped: list[bool] = []

    def batch_decode(self, token_ids: list[list[int]], skip_special_tokens: bool) -> list[str]:
        self.skipped.append(skip_special_tokens)
        return [" ".join(map(str, each)) for each in token_ids]


class Reward:
    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> Scores:
        return Scores(tuple(float(response.text.split()[1]) for response in responses))


def test_it_samples_as_the_set_says_and_scores_what_was_said() -> None:
    pool, tokenizer = Pool(), Tokenizer()
    parts: tuple[Any, ...] = (pool, Reward(), tokenizer)
    rollout = rollout_section(max_response_tokens=9, stop=(2,), temperature=0.9)
    maker = SingleTurns(*parts, rollout, 3)
    config = EvaluationSet(name="held-out", source="rows.jsonl", num_samples=4, temperature=0.5, top_p=0.95, top_k=20)
    scored = ScoredPrompt.of(*asyncio.run(maker.evaluate(config, PROMPT, "v5")))
    assert (scored.rewards, scored.num_tokens, scored.num_truncated) == ((0.0, 1.0, 2.0, 3.0), 8, 1)
    ((prompt, sampling, request_id, version),) = pool.asked
    assert (prompt, request_id, version) == (PROMPT.token_ids, "v5-evaluation-held-out-7", "v5")
    assert (sampling.n, sampling.max_tokens, sampling.temperature, sampling.stop_token_ids) == (4, 9, 0.5, [2])
    assert (sampling.top_p, sampling.top_k) == (0.95, 20)
    assert sampling.seed == evaluation_seed(3, "held-out", "7")
    assert tokenizer.skipped == [True]


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        ("single_turn", SingleTurns),
        (f"python:{__file__}:play", ProgramGroupMaker),
        pytest.param("command:true", ProgramGroupMaker, marks=needs_part("gateway")),
    ],
)
def test_a_run_has_one_maker_by_its_program(
    program: str, kind: type[GroupMaker], tiny_model: Callable[..., Path]
) -> None:
    renderer = {} if program == "single_turn" else {"options": {"renderer": "template"}}
    tree = minimal_tree() | {"rollout": {"program": program, **renderer}}
    pool: Any = ScriptedPool()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    assert type(make_group_maker(parse_config(tree, "here"), pool, tokenizer, make_reward(RewardSection()))) is kind


def test_seeds_leave_room_for_the_responses_and_no_two_prompts_share_one() -> None:
    seeds = [evaluation_seed(run, name, str(row)) for run in range(5) for name in ("a", "b") for row in range(400)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 and seed % 2**RESPONSE_BITS == 0 for seed in seeds)
    assert evaluation_seed(1, "a", "2") == evaluation_seed(1, "a", "2")


class TwoTurns:
    """A program in this process: a second turn, longer than what is left of the tokens, truncates every rollout."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def run(self, prompt: ProgramPrompt, session: RolloutSession) -> RolloutResult:
        if "broken" in prompt.row:
            raise ProgramFailed(": it is broken")
        first = await session.generate(token_ids=prompt.token_ids)
        await session.generate(token_ids=[*first.prompt_token_ids, *first.token_ids, 5])
        return RolloutResult(float(prompt.seed % 7))


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_a_program_is_evaluated_as_it_is_trained(tiny_model: Callable[..., Path], temperature: float) -> None:
    pool: Any = ScriptedPool(lambda context, seed: [9, 9, 9, 1] if len(context) == 2 else [9] * 9)
    rollout = rollout_section(program="python:x.py:f", max_response_tokens=8, max_attempts=1)
    tokenizer, reward = AutoTokenizer.from_pretrained(tiny_model()), make_reward(RewardSection())
    prompts = PromptsSection(source="x.jsonl", prompts_per_batch=1, chat_template=False)
    shown: list[Any] = []

    async def score(row: dict[str, Any], version: str) -> ScoredPrompt:
        programs = make_program_rollouts(rollout, prompts, 3, "m", pool, tokenizer, reward, program=TwoTurns())
        config = EvaluationSet(
            name="held-out", source="rows.jsonl", num_samples=4, temperature=temperature, top_p=0.9, top_k=7
        )
        prompt = Prompt("7", (3, 4), row)
        trajectories, scores = await programs.evaluate(config, prompt, version)
        shown.append(([trajectory.last for trajectory in trajectories], scores))
        assert programs.take_figures() == {}, "it is no part of the training's figures"
        return ScoredPrompt.of(trajectories, scores)

    first, later = asyncio.run(score({"prompt": "q"}, "v5")), asyncio.run(score({"prompt": "q"}, "v6"))
    assert first == later, "only the weights differ"
    assert (len(set(first.rewards)) > 1, first.num_tokens, first.num_truncated) == (True, 4 * 8, 4)
    assert {sampling.temperature for _, sampling in pool.asked} == {temperature}
    assert {(sampling.top_p, sampling.top_k) for _, sampling in pool.asked} == {(0.9, 7)}
    assert len({sampling.seed for _, sampling in pool.asked}) == 8, "four rollouts of two turns, twice"
    ((responses, scores), _) = shown
    assert [len(response.token_ids) for response in responses] == [4] * 4 and scores.rewards == first.rewards
    with pytest.raises(RolloutFailed, match="rollout 0 of prompt '7' of evaluation set 'held-out', attempt 1 of 1"):
        asyncio.run(score({"prompt": "q", "broken": 1}, "v7"))


class ReadsMessages(TwoTurns):
    """Shows the messages that it gets, and has one turn."""

    def __init__(self) -> None:
        self.shown: list[Any] = []

    async def run(self, prompt: ProgramPrompt, session: RolloutSession) -> RolloutResult:
        self.shown.append(prompt.messages)
        await session.generate(messages=prompt.messages)
        return RolloutResult(1.0)


MIXTURE = {"mixture": [{"name": "sums", "source": "sums.jsonl"}, {"name": "words", "source": "words.jsonl"}]}


@pytest.mark.parametrize(
    ("training", "of_set", "row"),
    [
        (MIXTURE, {}, {"prompt": "q"}),
        (MIXTURE, {}, {"prompt": "q", "source": "sums"}),
        (
            {"source": "x.jsonl", "columns": {"prompt": "question"}},
            {"columns": {"prompt": "asked"}},
            {"prompt": "q", "asked": "q"},
        ),
        ({"source": "reasoning-gym:chain_sum"}, {"columns": {}}, {"prompt": "q", "question": "another one"}),
        ({"source": "x.jsonl"}, {"source": "reasoning-gym:chain_sum"}, {"question": "q"}),
        (MIXTURE, {"source": "held-out"}, {"prompt": "q", "source": "words"}),
    ],
)
def test_a_program_gets_the_messages_of_a_set_by_the_settings_of_that_set(
    tiny_model: Callable[..., Path], training: dict[str, Any], of_set: dict[str, Any], row: dict[str, Any]
) -> None:
    prompts = PromptsSection.model_validate({"prompts_per_batch": 1, "system_prompt": "Think."} | training)
    rollout = rollout_section(program="python:x.py:f", max_response_tokens=8, max_attempts=1, renderer="template")
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model())
    reward, program = make_reward(RewardSection()), ReadsMessages()
    pool: Any = ScriptedPool(lambda context, seed: [9, 1])

    async def score() -> None:
        programs = make_program_rollouts(rollout, prompts, 3, "m", pool, tokenizer, reward, program=program)
        prompt = Prompt("7", (3, 4), row)
        config = EvaluationSet.model_validate({"name": "other", "source": "y.jsonl", "num_samples": 1} | of_set)
        await programs.evaluate(config, prompt, "v5")

    asyncio.run(score())
    assert program.shown == [[{"role": "system", "content": "Think."}, {"role": "user", "content": "q"}]]
