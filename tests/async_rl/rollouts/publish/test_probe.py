"""What a probe asks an engine, and whom it finds out."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from async_rl.config.pool_section import PublishSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.errors import InstanceUnreachable
from async_rl.method.proof.gap_limits import noise_scale
from async_rl.method.token_arrays import Logprobs, TokenIds
from async_rl.rollouts.instance.partial_rollout import PartialRollout
from async_rl.rollouts.pool.member import Member
from async_rl.rollouts.publish.probe import MAX_WIDE, WIDE, Probe
from async_rl.rollouts.publish.trial_request import NUM_TOKENS, Samples
from async_rl.shared.protocol.inference import SamplingParams
from tests.support.fresh_seed import fresh_seed
from tests.support.members import ready_member

PROMPT = [5, 6, 7]
NAN = float("nan")
INF = float("inf")


def probe_of(
    *, max_response_tokens: int = 100, temperature: float = 1.0, noise: float = noise_scale("bfloat16"), **settings: Any
) -> Probe:
    rollout = RolloutSection(max_response_tokens=max_response_tokens, temperature=temperature)
    return Probe(PublishSection(**settings), rollout, PROMPT, noise)


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
        for partial in partials:
            partial.token_ids.extend(range(self.num_tokens or 0))
            partial.logprobs.extend([-1.0] * (self.num_tokens or 0))
            partial.finish_reason = "length"


@pytest.mark.parametrize(
    ("max_response_tokens", "length", "number"), [(100, 16, 4), (16, 16, 4), (3, 3, 22), (1, 1, 64)]
)
def test_it_asks_as_a_rollout_does_for_64_tokens_in_responses_no_longer_than_its(
    max_response_tokens: int, length: int, number: int
) -> None:
    engine: Any = Engine(length)
    probe = probe_of(max_response_tokens=max_response_tokens, temperature=0.7)
    samples = asyncio.run(probe.ask(engine, "v3"))
    ((prompt, sampling, request_id),) = engine.asked
    assert (prompt, request_id, [len(tokens) for tokens, _ in samples]) == (PROMPT, "probe-v3", [length] * number)
    assert (sampling.max_tokens, sampling.temperature, sampling.ignore_eos, sampling.logprobs) == (length, 0.7, True, 0)


def test_an_engine_that_does_not_answer_in_time_is_unreachable() -> None:
    engine: Any = Engine(None)
    with pytest.raises(
        InstanceUnreachable, match=r"http://a:1 did not answer the probe of 'v3' within 0\.05 s \(publish"
    ):
        asyncio.run(probe_of(timeout_s=0.05).ask(engine, "v3"))


def judged(gaps: Sequence[float], dtype: str = "bfloat16") -> str | None:
    """What a probe says of an engine with these gaps to the trainer, in two responses; a sound one is beside it."""
    sound, other = ready_member("sound"), ready_member("other")
    trainer = [-1.0 - i % 7 for i in range(len(gaps))]
    own = [a + b for a, b in zip(trainer, gaps, strict=True)]
    half, tokens = len(gaps) // 2, list(range(len(gaps)))
    parts = [slice(0, half), slice(half, None)]
    answers: dict[Member, Samples] = {
        member: [(TokenIds([first, *tokens[part]]), Logprobs([-1.0, *logprobs[part]])) for part in parts]
        for member, first, logprobs in ((sound, 900, trainer), (other, 901, own))
    }
    scores = {
        (first, *tokens[part]): [-1.0, *trainer[part]] for first in (900, 901) for part in parts
    }  # fmt: skip
    noise = noise_scale(dtype)
    failures = probe_of(noise=noise).judge(answers, lambda prompt, asked: [scores[tuple(each)] for each in asked])
    assert sound not in failures
    return str(failures[other]) if failures else None


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("dtype", "wide"), [("bfloat16", 0.51), ("float32", 0.001), ("bfloat16", 3.0)])
def test_an_engine_is_found_out_when_more_than_a_quarter_of_its_gaps_are_wide(
    dtype: str, wide: float, sign: int
) -> None:
    # Of 64 tokens two begin the responses, and are the same for both.
    assert judged([sign * wide] * 16 + [0.0] * 46, dtype) is None
    said = judged([0.0] * 45 + [sign * wide] * 17, dtype)
    assert said is not None and said.startswith("instance http://other:1 gives 17 of 64 tokens of the probe")
    assert f"more than {8 * noise_scale(dtype):.2g} nats" in said and "a quarter may be" in said


def test_gaps_that_are_not_wide_are_noise_however_many() -> None:
    assert judged([0.49, -0.49] * 31) is None and judged([0.49, -0.49] * 31, "float32") is not None


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 30, 61])
def test_one_token_whose_log_prob_is_no_finite_number_is_enough(bad: float, place: int) -> None:
    gaps = [0.0] * 62
    gaps[place] = bad
    assert "expected finite numbers" in (judged(gaps) or "passed")


@pytest.mark.parametrize(
    ("rms", "tail", "cluster"),
    [(0.036, 1e-4, 1), (0.055, 5e-3, 1), (0.055, 5e-3, 4)],
    ids=["dense", "experts", "experts, four neighbours alike"],
)
def test_noise_as_it_was_reported_raises_no_alarm_in_100_000_publishes(rms: float, tail: float, cluster: int) -> None:
    """Most gaps are normal; a share of `tail` are wide, between half a nat and three."""
    rng = np.random.default_rng(fresh_seed())
    shape = (100_000, NUM_TOKENS // cluster)
    gaps = np.where(rng.random(shape) < tail, rng.uniform(0.5, 3.0, shape), rng.normal(0.0, rms, shape))
    wide = (np.abs(gaps) > WIDE * noise_scale("bfloat16")).repeat(cluster, axis=1).mean(axis=1)
    share = (wide > 0).mean()
    assert share > 0.5 * NUM_TOKENS // cluster * tail, "one wide gap alone would be an alarm"
    print(f"an alarm at one wide gap: {share:.1%} of publishes; the largest share of wide gaps: {wide.max():.3f}")
    assert (wide <= MAX_WIDE).all()


def test_answers_that_are_the_same_are_scored_once_and_none_are_not_scored() -> None:
    scored: list[Sequence[TokenIds]] = []

    def score(prompt: Sequence[int], responses: Sequence[TokenIds]) -> list[list[float]]:
        assert prompt == PROMPT
        scored.append(responses)
        return [[-1.0] * len(each) for each in responses]

    members: list[Member] = [ready_member(f"m{i}") for i in range(5)]
    answers = {member: [(TokenIds([i % 2, 9]), Logprobs([-1.0, -1.0]))] for i, member in enumerate(members)}
    assert probe_of().judge(answers, score) == {}
    assert scored == [[(0, 9), (1, 9)]]
    assert probe_of().judge({}, score) == {} and len(scored) == 1
