"""From an engine's streams to the chunks of streaming responses, as JSON; the generation routes call it."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from async_rl.shared.protocol.inference import SamplingParams
from inference_service.api.completion_choice import CompletionFormatter
from inference_service.api.event_stream import Chunks
from inference_service.api.requests import CompletionChunk, CompletionRequest
from inference_service.api.responses import GenerateChunks, TextCodec
from inference_service.engine_interface import Choice

Deltas = AsyncGenerator[dict[int, Choice], None]
"""Deltas by the choice's index."""


async def generate_chunks(
    request_id: str, params: SamplingParams, deltas: Deltas, *, as_frames: bool = False
) -> Chunks:
    """One chunk for all choices that have deltas at the same time, as JSON or as a frame."""
    answer = GenerateChunks(request_id, params)
    chunk = answer.frame if as_frames else answer.chunk
    num_open = params.n
    async with aclosing(deltas):
        async for choices in deltas:
            num_open -= _num_ended(choices)
            yield chunk(choices), num_open == 0


async def completion_chunks(
    request_id: str,
    model: str,
    body: CompletionRequest,
    prompts: Sequence[Sequence[int]],
    codec: TextCodec | None,
    deltas: Sequence[Deltas],
) -> Chunks:
    """The same for `/v1/completions`, with one stream per prompt; choices are numbered prompt by prompt."""
    created = int(time.time())
    formatters = [CompletionFormatter(i, body, prompts[i // body.n], codec) for i in range(len(prompts) * body.n)]
    num_open = len(formatters)
    async with aclosing(_merged(deltas, body.n)) as merged:
        async for choices in merged:
            chunk = CompletionChunk(
                id=request_id,
                created=created,
                model=model,
                choices=[formatters[index].format(choice) for index, choice in choices.items()],
            )
            num_open -= _num_ended(choices)
            yield chunk.model_dump_json().encode(), num_open == 0


async def _merged(streams: Sequence[Deltas], num_children: int) -> Deltas:
    """All streams as one; child j of stream i is choice i * num_children + j."""
    arrived: asyncio.Queue[dict[int, Choice] | None] = asyncio.Queue()

    async def forward(i: int, stream: Deltas) -> None:
        async with aclosing(stream):
            async for choices in stream:
                arrived.put_nowait({i * num_children + j: choice for j, choice in choices.items()})

    tasks = [asyncio.ensure_future(forward(i, stream)) for i, stream in enumerate(streams)]
    ended = asyncio.gather(*tasks)
    ended.add_done_callback(lambda _: arrived.put_nowait(None))
    try:
        while (choices := await arrived.get()) is not None:
            yield choices
        ended.result()
    finally:
        for task in tasks:
            task.cancel()


def _num_ended(choices: dict[int, Choice]) -> int:
    return sum(choice.finish_reason is not None for choice in choices.values())
