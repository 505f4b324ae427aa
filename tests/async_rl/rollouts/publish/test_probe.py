"""What a probe asks an engine, and whom it finds out."""

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from async_rl.config.pool_section import PublishSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.errors import InstanceUnreachable
from async_rl.rollouts.instance.partial_rollout import PartialRollout
from async_rl.rollouts.pool.member import Member
from async_rl.rollouts.publish.probe import Probe, largest_deviation
from async_rl.shared.protocol.inference import SamplingParams
from tests.support.groups import make_response
from tests.support.members import ready_member

PROMPT = [5, 6, 7]
NAN = float("nan")
INF = float("inf")


def probe_of(*, max_response_tokens: int = 100, temperature: float = 1.0, **settings: Any) -> Probe:
    rollout = RolloutSection(max_response_tokens=max_response_tokens, temperature=temperature)
    return Probe(PublishSection(**settings), rollout, PROMPT)


class Engine:
    """Answers a probe with these tokens; or not at all."""

    url = "http://a:1"

    def __init__(self, num_tokens: int | None) -> None:
        self.num_tokens = num_tokens
        self.asked: list[tuple[list[int], SamplingParams, str]] = []

    async def generate(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        request_id: str,
        version: str,
        partials: Sequence[PartialRollout],
    ) -> None:
        self.asked.append((prompt, sampling, request_id))
        if self.num_tokens is None:
            await asyncio.Event().wait()
        (partial,) = partials
        partial.token_ids.extend(range(self.num_tokens or 0))
        partial.logprobs.extend([-1.0] * (self.num_tokens or 0))
        partial.finish_reason = "length"


@pytest.mark.parametrize(("max_response_tokens", "asked"), [(100, 8), (3, 3), (1, 1)])
def test_it_asks_as_a_rollout_does_and_for_no_more_than_one(max_response_tokens: int, asked: int) -> None:
    engine: Any = Engine(asked)
    probe = probe_of(max_response_tokens=max_response_tokens, temperature=0.7)
    response = asyncio.run(probe.ask(engine, "v3"))
    ((prompt, sampling, request_id),) = engine.asked
    assert (prompt, request_id, len(response.token_ids)) == (PROMPT, "probe-v3", asked)
    assert (sampling.max_tokens, sampling.temperature, sampling.ignore_eos, sampling.logprobs) == (asked, 0.7, True, 0)


def test_an_engine_that_does_not_answer_in_time_is_unreachable() -> None:
    engine: Any = Engine(None)
    with pytest.raises(
        InstanceUnreachable, match=r"http://a:1 did not answer the probe of 'v3' within 0\.05 s \(publish"
    ):
        asyncio.run(probe_of(timeout_s=0.05).ask(engine, "v3"))


@pytest.mark.parametrize("bad", [0.51, -0.51, 3.0, NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("whose", ["rollout", "trainer"])
def test_one_token_is_enough_to_find_an_engine_out(bad: float, place: int, whose: str) -> None:
    members = [ready_member("sound"), ready_member("wrong")]
    mine, theirs = [-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0]
    (mine if whose == "rollout" else theirs)[place] += bad
    answers = {
        members[0]: make_response((1, 2, 3), logprobs=(-1.0, -2.0, -3.0)),
        members[1]: make_response((4, 5, 6), logprobs=mine),
    }
    scores = {(1, 2, 3): [-1.4, -2.0, -3.4], (4, 5, 6): theirs}
    failures = probe_of().judge(answers, lambda prompt, tokens: [scores[each] for each in tokens])
    assert list(failures) == [members[1]]
    assert f"http://wrong:1 gives token {place} of the probe" in str(failures[members[1]])
    assert "more than 0.5 apart" in str(failures[members[1]])


def test_answers_that_are_the_same_are_scored_once_and_none_are_not_scored() -> None:
    scored: list[Sequence[tuple[int, ...]]] = []

    def score(prompt: Sequence[int], responses: Sequence[tuple[int, ...]]) -> list[list[float]]:
        assert prompt == PROMPT
        scored.append(responses)
        return [[-1.0] * len(each) for each in responses]

    members: list[Member] = [ready_member(f"m{i}") for i in range(5)]
    answers = {member: make_response((i % 2, 9)) for i, member in enumerate(members)}
    assert probe_of().judge(answers, score) == {}
    assert scored == [[(0, 9), (1, 9)]]
    assert probe_of().judge({}, score) == {} and len(scored) == 1


def test_the_largest_deviation_is_that_of_the_first_that_is_no_number_or_else_of_the_widest() -> None:
    rng = Random(0)
    for _ in range(200):
        rollout = [rng.uniform(-5, 0) for _ in range(rng.randint(1, 8))]
        trainer = [rng.uniform(-5, 0) for _ in rollout]
        index = rng.randrange(len(rollout))
        if rng.random() < 0.5:
            trainer[index] = NAN
        else:
            index = max(range(len(rollout)), key=lambda i: abs(rollout[i] - trainer[i]))
        found = largest_deviation(rollout, trainer)
        assert found.index == index
    with pytest.raises(ValueError, match="longer"):
        largest_deviation([1.0], [1.0, 2.0])
