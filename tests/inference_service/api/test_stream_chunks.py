"""Streams of several prompts become one answer: nothing is lost, the last chunk is told as such, an end closes all."""

import asyncio
import json
from array import array
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.shared.protocol import token_frames
from async_rl.shared.protocol.inference import SamplingParams
from inference_service.api.generation_routes import completion_chunks, generate_chunks
from inference_service.api.requests import CompletionRequest
from inference_service.engine_interface import Choice, OutOfService, Sample

Events = Sequence[dict[int, Choice]]


class Stream:
    """An engine's stream of these events, each some turns of the loop after the one before."""

    def __init__(self, events: Events, waits: Sequence[int] = (), error: Exception | None = None) -> None:
        self.events, self.waits, self.error = events, waits, error
        self.closed = False

    async def deltas(self) -> AsyncGenerator[dict[int, Choice], None]:
        try:
            for i, event in enumerate(self.events):
                for _ in range(self.waits[i] if i < len(self.waits) else 0):
                    await asyncio.sleep(0)
                yield event
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


def piece(*token_ids: int, ends: bool = False) -> Choice:
    samples = tuple(Sample(token, -1.0, 1, (), "v") for token in token_ids)
    return Choice(samples, "stop" if ends else None, None)


@st.composite
def streams(draw: st.DrawFn, n: int, first_token: int) -> Stream:
    """Of `n` choices that each end once, at times of their own; every token is another."""
    tokens = iter(range(first_token, first_token + 100))
    left = {j: draw(st.integers(1, 3)) for j in range(n)}
    events = []
    while left:
        chosen = draw(st.sets(st.sampled_from(sorted(left)), min_size=1))
        event = {}
        for j in sorted(chosen):
            left[j] -= 1
            event[j] = piece(next(tokens), ends=left[j] == 0)
            if left[j] == 0:
                del left[j]
        events.append(event)
    return Stream(events, draw(st.lists(st.integers(0, 3), max_size=6)))


async def read(body: CompletionRequest, some: Sequence[Stream]) -> list[tuple[dict[str, Any], bool]]:
    prompts = [(1,)] * len(some)
    chunks = completion_chunks("r", "m", body, prompts, None, [stream.deltas() for stream in some])
    return [(json.loads(data), is_last) async for data, is_last in chunks]


@settings(max_examples=30)
@given(st.data(), st.integers(1, 3), st.integers(1, 3))
def test_streams_of_several_prompts_are_told_as_one(data: st.DataObject, num_prompts: int, n: int) -> None:
    some = [data.draw(streams(n, 100 * i)) for i in range(num_prompts)]
    body = CompletionRequest(prompt="x", n=n, return_token_ids=True)
    chunks = asyncio.run(read(body, some))
    assert [is_last for _, is_last in chunks] == [False] * (len(chunks) - 1) + [True]
    tokens: dict[int, list[int]] = {i: [] for i in range(num_prompts * n)}
    for chunk, _ in chunks:
        for choice in chunk["choices"]:
            tokens[choice["index"]] += choice["token_ids"]
    assert tokens == {
        i * n + j: [s.token_id for event in stream.events if j in event for s in event[j].samples]
        for i, stream in enumerate(some)
        for j in range(n)
    }
    assert all(stream.closed for stream in some)


@settings(max_examples=30)
@given(st.data(), st.integers(1, 4))
def test_the_last_chunk_of_a_generate_stream_is_the_one_in_which_the_last_choice_ends(
    data: st.DataObject, n: int
) -> None:
    stream = data.draw(streams(n, 0))

    async def told() -> list[bool]:
        return [is_last async for _, is_last in generate_chunks("r", SamplingParams(n=n), stream.deltas())]

    assert asyncio.run(told()) == [False] * (len(stream.events) - 1) + [True]


def test_a_stream_that_breaks_ends_the_answer_and_the_other_streams() -> None:
    broken = Stream([{0: piece(1)}], error=OutOfService("the weights broke"))
    other = Stream([{0: piece(2)}] * 50, [10] * 50)
    with pytest.raises(OutOfService, match="the weights broke"):
        asyncio.run(read(CompletionRequest(prompt=["x", "y"]), [broken, other]))
    assert broken.closed and other.closed


def test_an_answer_that_is_closed_early_closes_its_streams() -> None:
    some = [Stream([{0: piece(1)}] * 50, [1] * 50) for _ in range(2)]

    async def leave() -> None:
        body = CompletionRequest(prompt=["x", "y"])
        chunks = completion_chunks("r", "m", body, [(1,), (1,)], None, [stream.deltas() for stream in some])
        await anext(chunks)
        await chunks.aclose()
        for _ in range(3):
            await asyncio.sleep(0)
        assert all(stream.closed for stream in some)

    asyncio.run(leave())


@settings(max_examples=30)
@given(stream=streams(3, 0))
def test_frames_have_the_tokens_log_probs_ends_and_versions_of_the_chunks(stream: Stream) -> None:
    async def scenario() -> tuple[list[Any], list[Any]]:
        params = SamplingParams(n=3, logprobs=0)
        events = Stream(stream.events)
        chunks = [chunk async for chunk in generate_chunks("r", params, events.deltas())]
        frames = [frame async for frame in generate_chunks("r", params, events.deltas(), as_frames=True)]
        return chunks, frames

    chunks, frames = asyncio.run(scenario())
    assert [is_last for _, is_last in frames] == [is_last for _, is_last in chunks]
    for (chunk, _), (payload, _) in zip(chunks, frames, strict=True):
        frame = token_frames.decode(payload)
        tokens, logprobs = iter(array("i", frame.token_ids.tobytes())), iter(array("f", frame.logprobs.tobytes()))
        for choice, framed in zip(json.loads(chunk)["choices"], frame.choices, strict=True):
            assert (framed.index, framed.finish_reason) == (choice["index"], choice["finish_reason"])
            assert [next(tokens) for _ in range(framed.num_tokens)] == choice["token_ids"]
            content = choice["logprobs"]["content"]
            assert [next(logprobs) for _ in range(framed.num_tokens)] == [each["logprob"] for each in content]
            assert framed.weight_versions == [token_frames.Span(**span) for span in choice["weight_versions"]]
