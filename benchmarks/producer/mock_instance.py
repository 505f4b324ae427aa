"""An inference instance without a model: `python -m benchmarks.producer.mock_instance SCRIPT`, JSON of a `Script`.

It responds to generate requests like an engine, at an engine's pace: after the time to the first token, a chunk of
every unfinished response for each `stream_interval` tokens; without `stream`, all at once at the end. Response lengths
are log-normal and a function of the seed. Chunks are rendered once and sent repeatedly, so that one core serves many
requests. It prints its ports, and ends with its standard input.
"""

import asyncio
import json
import math
import os
import random
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from aiohttp import web

from async_rl.shared.protocol import inference, routes, token_frames

MAX_CONCURRENCY = 2**20
"""Reported to the pool, which would otherwise hold back most of a batch: the rollouts of all of it are measured. For
thousands of groups at two instances, which serve no health check meanwhile, there is a lower one."""

NUM_VARIANTS = 16
"""Number of different chunks of one length; more would only fill the caches."""


@dataclass(frozen=True, slots=True)
class Script:
    """`mean_tokens` of the responses, log-normal with `sigma`; the pace in seconds; `version` of all tokens."""

    version: str
    mean_tokens: int
    sigma: float
    first_token_s: float
    token_s: float
    vocab_size: int
    has_frames: bool = True
    max_concurrency: int = MAX_CONCURRENCY
    ports: int = 1
    """Each an instance to those who connect."""


class MockInstance:
    """Serves the routes that a pool uses."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get(routes.HEALTH, self.health),
            web.get(routes.VERSION, self.dialect),
            web.get(routes.MODELS, self.models),
            web.get(routes.WEIGHT_INFO, self.weight_info),
            web.post(routes.GENERATE, self.generate),
        ]

    async def report_concurrency(self, _request: web.Request, response: web.StreamResponse) -> None:
        response.headers[routes.MAX_CONCURRENCY_HEADER] = str(self._script.max_concurrency)

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def dialect(self, request: web.Request) -> web.Response:
        return web.json_response({"version": routes.PROTOCOL_VERSION})

    async def models(self, request: web.Request) -> web.Response:
        card = {"id": "mock", "owned_by": routes.OWNED_BY_EMBEDDED, "max_model_len": 2**20}
        return web.json_response({"data": [card]})

    async def weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._script.version})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = inference.GenerateRequest.model_validate_json(await request.read())
        sampling = body.sampling_params
        assert sampling.seed is not None, "the trainer gives every group a seed"
        lengths = [self._length(sampling.seed + j, sampling.max_tokens) for j in range(sampling.n)]
        head = f'{{"request_id":{json.dumps(body.request_id)},"choices":['.encode()
        interval = sampling.stream_interval or 1
        if not body.stream:
            await asyncio.sleep(self._script.first_token_s + max(lengths) * self._script.token_s)
            choices = (self._choice(j, 0, length, length) for j, length in enumerate(lengths))
            return web.Response(body=head + b",".join(choices) + b"]}", content_type="application/json")
        has_frames = self._script.has_frames and token_frames.MEDIA_TYPE in request.headers.get("Accept", "")
        media_type = token_frames.MEDIA_TYPE if has_frames else "text/event-stream"
        response = web.StreamResponse(headers={"Content-Type": media_type})
        steps = self._frames(lengths, interval) if has_frames else self._events(head, lengths, interval)
        with suppress(ConnectionResetError):  # the client has disconnected
            await response.prepare(request)
            await self._stream(response, steps, interval * self._script.token_s)
        return response

    async def _stream(self, response: web.StreamResponse, steps: Iterator[bytes], step_s: float) -> None:
        due = time.monotonic() + self._script.first_token_s
        for data in steps:
            due += step_s
            await asyncio.sleep(due - time.monotonic())
            await response.write(data)

    def _length(self, seed: int, max_tokens: int) -> int:
        sigma = self._script.sigma
        drawn = self._script.mean_tokens * random.Random(seed).lognormvariate(-sigma * sigma / 2, sigma)
        return max(1, min(max_tokens, round(drawn)))

    def _events(self, head: bytes, lengths: list[int], interval: int) -> Iterator[bytes]:
        """For each step of the engine, an event of every response that is not finished."""
        for start in range(0, max(lengths), interval):
            yield b"".join(
                b"data: " + head + self._choice(j, start, min(start + interval, length), length) + b"]}\n\n"
                for j, length in enumerate(lengths)
                if start < length
            )
        yield b"data: [DONE]\n\n"

    def _frames(self, lengths: list[int], interval: int) -> Iterator[bytes]:
        """For each step of the engine, a frame of all responses that are not finished."""
        script = self._script
        for start in range(0, max(lengths), interval):
            choices, arrays = [], []
            for j, length in enumerate(lengths):
                if start < length:
                    end = min(start + interval, length)
                    spans = [token_frames.Span(script.version, 0, end)]
                    choices.append(token_frames.FramedChoice(j, end - start, "stop" if end == length else None, spans))
                    arrays.append(token_arrays(end - start, (j + start) % NUM_VARIANTS, script.vocab_size))
            token_ids, logprobs = (memoryview(b"".join(parts)) for parts in zip(*arrays, strict=True))
            yield token_frames.framed(token_frames.encode(token_frames.Frame(choices, token_ids, logprobs)))
        yield token_frames.END

    def _choice(self, index: int, start: int, end: int, length: int) -> bytes:
        finish = b'"stop"' if end == length else b"null"
        tokens = rendered_tokens(end - start, (index + start) % NUM_VARIANTS, self._script.vocab_size)
        version = self._script.version.encode()
        return (
            b'{"index":%d,"finish_reason":%b,%b,"weight_versions":[{"version":"%b","start":0,"end":%d}]}'
            % (index, finish, tokens, version, end)
        )  # fmt: skip


@cache
def token_arrays(count: int, variant: int, vocab_size: int) -> tuple[bytes, bytes]:
    """`count` tokens, int32, and their log-probs, float32."""
    draw = random.Random(f"{count}/{variant}")
    token_ids = [draw.randrange(vocab_size) for _ in range(count)]
    return array("i", token_ids).tobytes(), array("f", [math.log(1 - draw.random()) for _ in token_ids]).tobytes()


@cache
def rendered_tokens(count: int, variant: int, vocab_size: int) -> bytes:
    """`count` tokens with their log-probs, as fields of a choice; with every field that the embedded engine writes."""
    token_ids, logprobs = (
        array(kind, data).tolist() for kind, data in zip("if", token_arrays(count, variant, vocab_size), strict=True)
    )
    content: list[dict[str, Any]] = [
        {"token_id": token_id, "logprob": logprob, "rank": None, "top_logprobs": []}
        for token_id, logprob in zip(token_ids, logprobs, strict=True)
    ]
    return json.dumps({"token_ids": token_ids, "logprobs": {"content": content}}, separators=(",", ":"))[1:-1].encode()


async def serve(instance: MockInstance, ports: int = 1) -> None:
    """Serves on free ports until standard input ends."""
    app = web.Application(client_max_size=2**24)
    app.add_routes(instance.routes())
    app.on_response_prepare.append(instance.report_concurrency)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    for _ in range(ports):
        # A whole batch connects at once.
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=8192).start()
    print(json.dumps({"ports": [address[1] for address in runner.addresses]}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)


if __name__ == "__main__":
    given = Script(**json.loads(sys.argv[1]))
    asyncio.run(serve(MockInstance(given), given.ports))
