"""Answers of the generate route: what a client reads of them is what the engine made, whole or in chunks."""

import json
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.shared.protocol.inference import GenerateChunk, GenerateResponse, SamplingParams
from inference_service.api.responses import LOWEST_LOGPROB, GenerateChunks, extend_spans, generate_response
from inference_service.engine_interface import Choice, Sample

LOGPROBS = st.floats(-50, 0) | st.just(float("-inf"))


@st.composite
def samples(draw: st.DrawFn, num_top: int | None, max_size: int = 6) -> tuple[Sample, ...]:
    """As the engine makes them: `top` has the sampled token first, and all that any request of the step asked for."""
    made = []
    for _ in range(draw(st.integers(0, max_size))):
        token, logprob = draw(st.integers(0, 99)), draw(st.floats(-50, 0))
        others = draw(st.lists(st.tuples(st.integers(0, 99), LOGPROBS, st.integers(1, 9)), max_size=4))
        top = ((token, logprob, 1), *others) if num_top else ()
        made.append(Sample(token, logprob, draw(st.integers(1, 9)), top, draw(st.sampled_from("ab"))))
    return tuple(made)


NUM_TOP = st.sampled_from([None, 0, 1, 3])


@settings(max_examples=30)
@given(st.data(), NUM_TOP, st.integers(1, 3))
def test_a_client_reads_what_was_sampled(data: st.DataObject, num_top: int | None, n: int) -> None:
    choices = [Choice(data.draw(samples(num_top)), "stop", 7) for _ in range(n)]
    body = generate_response("r1", "m", 5, choices, SamplingParams(n=n, logprobs=num_top))
    answer = GenerateResponse.model_validate_json(body)
    assert answer.request_id == "r1"
    counts = json.loads(body)["usage"]
    num_tokens = sum(len(choice.samples) for choice in choices)
    assert (counts["prompt_tokens"], counts["completion_tokens"]) == (5, num_tokens)
    assert counts["total_tokens"] == 5 + num_tokens
    for index, (told, choice) in enumerate(zip(answer.choices, choices, strict=True)):
        assert (told.index, told.finish_reason, told.stop_reason) == (index, "stop", 7)
        assert told.token_ids == [sample.token_id for sample in choice.samples]
        if num_top is None:
            assert told.logprobs is None
            continue
        assert told.logprobs is not None and told.logprobs.content is not None
        for entry, sample in zip(told.logprobs.content, choice.samples, strict=True):
            assert (entry.token_id, entry.logprob, entry.rank) == (sample.token_id, sample.logprob, sample.rank)
            # vLLM's form: not more than were asked for, and numbers where JSON has none.
            top = [(t.token_id, t.logprob, t.rank) for t in entry.top_logprobs]
            assert top == [(t, max(lp, LOWEST_LOGPROB), r) for t, lp, r in sample.top[:num_top]]


@settings(max_examples=30)
@given(samples(None, max_size=12), st.lists(st.integers(0, 12), max_size=4))
def test_chunks_add_up_and_their_spans_cover_the_whole_output_so_far(
    sampled: tuple[Sample, ...], cuts: list[int]
) -> None:
    chunks = GenerateChunks("r1", SamplingParams(n=2))
    bounds = [0, *sorted(min(cut, len(sampled)) for cut in cuts), len(sampled)]
    tokens: list[int] = []
    for start, stop in pairwise(bounds):
        chunk = GenerateChunk.model_validate_json(chunks.chunk({1: Choice(sampled[start:stop], None, None)}))
        (choice,) = chunk.choices
        assert choice.index == 1 and choice.finish_reason is None
        tokens += choice.token_ids or []
        assert choice.weight_versions is not None
        versions = [span.version for span in choice.weight_versions for _ in range(span.start, span.end)]
        assert versions == [sample.version for sample in sampled[:stop]]
        assert all(one.end == other.start for one, other in pairwise(choice.weight_versions))
    assert tokens == [sample.token_id for sample in sampled]


def test_neighbouring_tokens_of_one_version_are_one_span() -> None:
    sampled = [Sample(0, 0.0, 1, (), version) for version in "aabba"]
    assert [(span["version"], span["start"], span["end"]) for span in extend_spans([], sampled)] == [
        ("a", 0, 2),
        ("b", 2, 4),
        ("a", 4, 5),
    ]
