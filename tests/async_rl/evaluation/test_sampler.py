"""One prompt of an evaluation set to its scored responses."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_rl.config.sections import EvaluationSet, RolloutSection
from async_rl.evaluation.sampler import Sampler
from async_rl.evaluation.sets import LoadedSet
from async_rl.protocol.inference import SamplingParams
from async_rl.seeds import RESPONSE_BITS, evaluation_seed
from async_rl.types import Prompt, Response

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
        return [
            Response(
                token_ids=(5, i),
                logprobs=(-1.0, -1.0),
                text="",
                finish_reason=reason,
                weight_spans=(),
                instance="http://a:1",
            )
            for i, reason in enumerate(reasons)
        ], 1


class Tokenizer:
    def __init__(self) -> None:
        self.skipped: list[bool] = []

    def batch_decode(self, token_ids: list[list[int]], skip_special_tokens: bool) -> list[str]:
        self.skipped.append(skip_special_tokens)
        return [" ".join(map(str, each)) for each in token_ids]


class Reward:
    correct_at = 1.0

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> list[float]:
        return [float(response.text.split()[1]) for response in responses]


def test_it_samples_as_the_set_says_and_scores_what_was_said(tmp_path: Path) -> None:
    pool, tokenizer = Pool(), Tokenizer()
    parts: tuple[Any, ...] = (pool, Reward(), tokenizer)
    rollout = RolloutSection(max_response_tokens=9, stop_token_ids=(2,), temperature=0.9)
    sampler = Sampler(*parts, rollout, 3, skip_special_tokens=False)
    config = EvaluationSet(name="held-out", source="rows.jsonl", num_samples=4, temperature=0.5)
    scored = asyncio.run(sampler.score(LoadedSet(config, (PROMPT,)), PROMPT, "v5"))
    assert (scored.rewards, scored.num_tokens, scored.num_cut) == ((0.0, 1.0, 2.0, 3.0), 8, 1)
    ((prompt, sampling, request_id, version),) = pool.asked
    assert (prompt, request_id, version) == (PROMPT.token_ids, "v5-evaluation-held-out-7", "v5")
    assert (sampling.n, sampling.max_tokens, sampling.temperature, sampling.stop_token_ids) == (4, 9, 0.5, [2])
    assert sampling.seed == evaluation_seed(3, "held-out", "7")
    assert tokenizer.skipped == [False] and sampler.correct_at == 1.0


def test_seeds_leave_room_for_the_responses_and_no_two_prompts_share_one() -> None:
    seeds = [evaluation_seed(run, name, str(row)) for run in range(5) for name in ("a", "b") for row in range(400)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 and seed % 2**RESPONSE_BITS == 0 for seed in seeds)
    assert evaluation_seed(1, "a", "2") == evaluation_seed(1, "a", "2")
