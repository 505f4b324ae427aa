"""A response as it arrives: what stays of it when it is cut, and the request that brings it further."""

from random import Random

import pytest

from async_rl.method.types import WeightSpan
from async_rl.rollouts.instance.partial_rollout import PartialRollout, request_of
from async_rl.shared.protocol.inference import SamplingParams

PROMPT = (3, 4)


def partial_of(length: int, seed: int = 0, bounds: tuple[int, ...] = ()) -> PartialRollout:
    partial = PartialRollout(seed)
    partial.token_ids.extend(range(10, 10 + length))
    partial.logprobs.extend(-float(place) for place in range(length))
    ends = [*bounds, length]
    partial.spans = [
        WeightSpan(f"v{i}", start, end) for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    partial.finish_reason = "stop"
    return partial


def test_a_cut_leaves_a_prefix_and_only_the_spans_that_lie_in_it() -> None:
    rng = Random(0)
    for _ in range(300):
        length = rng.randint(1, 12)
        partial = partial_of(
            length, bounds=tuple(sorted(rng.sample(range(1, 12), rng.randrange(3)))) if length == 12 else ()
        )
        spans, kept = partial.spans, rng.randint(0, 14)
        partial.cut(kept)
        assert list(partial.token_ids) == list(range(10, 10 + min(kept, length)))
        assert len(partial.logprobs) == len(partial.token_ids)
        assert partial.spans == [span for span in spans if span.end <= kept]
        assert partial.finish_reason == ("stop" if kept >= length else None), "what was cut has not ended"
        if partial.finish_reason is None:
            with pytest.raises(AssertionError, match="unfinished partial rollout"):
                partial.response()


@pytest.mark.parametrize("noise_by_position", [True, False])
@pytest.mark.parametrize("num", [1, 2, 5])
def test_partials_without_tokens_are_one_request_with_the_seed_of_the_first(num: int, noise_by_position: bool) -> None:
    sampling = SamplingParams(n=9, max_tokens=20, min_tokens=4, seed=1, logprobs=0)
    partials = [PartialRollout(7 + j) for j in range(num)]
    prompt, params = request_of(PROMPT, sampling, partials, noise_by_position=noise_by_position)
    assert prompt == list(PROMPT)
    seed = 7 if noise_by_position else None
    assert params == sampling.model_copy(update={"n": num, "seed": seed, "stream_interval": 2})


@pytest.mark.parametrize(("max_tokens", "interval"), [(1, 1), (15, 1), (16, 2), (511, 63), (512, 64), (32_768, 64)])
def test_a_lost_instance_takes_an_eighth_of_a_response_with_it_or_64_tokens_at_most(
    max_tokens: int, interval: int
) -> None:
    _, params = request_of(PROMPT, SamplingParams(max_tokens=max_tokens), [PartialRollout(0)], noise_by_position=True)
    assert params.stream_interval == interval


@pytest.mark.parametrize("noise_by_position", [True, False])
@pytest.mark.parametrize(("length", "min_tokens", "left"), [(1, 4, 3), (4, 4, 0), (9, 4, 0), (19, 0, 0)])
def test_a_continuation_asks_for_the_rest_with_its_prefix_as_prompt(
    length: int, min_tokens: int, left: int, noise_by_position: bool
) -> None:
    sampling = SamplingParams(n=9, max_tokens=20, min_tokens=min_tokens, seed=1, logprobs=0)
    partial = partial_of(length, seed=7)
    prompt, params = request_of(PROMPT, sampling, [partial], noise_by_position=noise_by_position)
    assert prompt == [*PROMPT, *partial.token_ids]
    assert (params.n, params.max_tokens, params.min_tokens) == (1, 20 - length, left)
    assert params.seed == (7 if noise_by_position else None)


@pytest.mark.parametrize("length", [0, 3])
def test_only_the_embedded_engine_is_told_of_turns(length: int) -> None:
    sampling = SamplingParams(max_tokens=20, seed=1, is_turn=True, num_continued=1)
    for noise_by_position, told in ((True, (True, 1 + length)), (False, (None, None))):
        _, params = request_of(PROMPT, sampling, [partial_of(length)], noise_by_position=noise_by_position)
        assert (params.is_turn, params.num_continued) == told


def test_partials_that_no_one_request_can_bring_further_are_our_own_mistake() -> None:
    sampling = SamplingParams(n=2, max_tokens=20, seed=0, logprobs=0)
    with pytest.raises(AssertionError):
        request_of(PROMPT, sampling, [PartialRollout(0), PartialRollout(2)], noise_by_position=True)
    with pytest.raises(AssertionError, match="a request of its own"):
        request_of(PROMPT, sampling, [partial_of(3), partial_of(3, seed=1)], noise_by_position=True)
