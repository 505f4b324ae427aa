"""A small inference instance that does as its script says: `python scripted_instance.py '{"version": "v1"}'`.

It speaks the protocol over HTTP in a process of its own, prints its port, and ends with its standard input. POST
/script changes the script, GET /seen tells what it was asked. Its responses are a function of the seed, as a real
engine's.

Script: version; max_model_len; delay_s before answering; slow_token: prompts with it get no answer; die_at, hang_at,
refuse_at, abort_at: the generate request (counted from 0) that meets that fate; serve_generate = false: only
completions; stale: the version it answers with; token; health: status of /health; short: answers one log-prob too few;
server, owner: of /version and the model card.

Streaming, with stream = true: token_s after each token; stop_after: tokens of every response after which the process
ends (fate "die"), or says no more ("hang"), or is out of step ("skip", "repeat": a chunk is left out, or sent twice);
versions_at_end: weight versions with the last chunk only, as vLLM; endless: no chunk says that it is the last.
"""

import asyncio
import json
import os
import random
import sys
from typing import Any

from aiohttp import web

DEFAULTS = {
    "version": "v1",
    "max_model_len": 64,
    "delay_s": 0.0,
    "serve_generate": True,
    "health": 200,
    "server": "0.32.0",
    "owner": "async-rl",
    "stream": False,
    "token_s": 0.0,
}


END = 2
"""The token that ends a response."""


class Instance:
    def __init__(self, script: dict[str, Any]) -> None:
        self.script = DEFAULTS | script
        self.requests: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.num_cancelled = 0

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/script", self.rescript),
            web.get("/seen", self.seen),
            web.get("/health", self.health),
            web.get("/version", self.server_version),
            web.get("/v1/models", self.models),
            web.get("/weight_info", self.weight_info),
            web.post("/inference/v1/generate", self.generate),
            web.post("/v1/completions", self.complete),
        ]

    @web.middleware
    async def watch(self, request: web.Request, handler: Any) -> web.StreamResponse:
        token = self.script.get("token")
        if token and request.headers.get("Authorization") != f"Bearer {token}":
            return refusal(401, "a bearer token is needed")
        if request.path not in ("/script", "/seen"):
            self.calls.append(request.path)
        try:
            return await handler(request)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    async def rescript(self, request: web.Request) -> web.Response:
        self.script |= await request.json()
        return web.json_response({})

    async def seen(self, request: web.Request) -> web.Response:
        seen = {"requests": self.requests, "calls": self.calls, "num_cancelled": self.num_cancelled}
        return web.json_response(seen)

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.script["health"])

    async def server_version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.script["server"]})

    async def models(self, request: web.Request) -> web.Response:
        card = {"id": "tiny", "max_model_len": self.script["max_model_len"], "owned_by": self.script["owner"]}
        return web.json_response({"data": [card]})

    async def weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.script["version"]})

    async def generate(self, request: web.Request) -> web.Response:
        if not self.script["serve_generate"]:
            raise web.HTTPNotFound(text='{"detail":"Not Found"}')
        body = await request.json()
        sampling = body["sampling_params"]
        if len(body["token_ids"]) + sampling["max_tokens"] > self.script["max_model_len"]:
            return refusal(400, "prompt and max_tokens are longer than the model")
        number = await self.suffer(body)
        if self.script["stream"] and body.get("stream"):
            return await self.stream(request, body)
        choices = []
        for j in range(sampling["n"]):
            token_ids, logprobs = sample(sampling["seed"] + j, len(body["token_ids"]), sampling["max_tokens"])
            if number == self.script.get("abort_at"):
                token_ids, logprobs = token_ids[:1], logprobs[:1]
            version = self.script.get("stale", self.script["version"])
            half = len(token_ids) // 2
            spans = [{"version": self.script["version"], "start": 0, "end": half}] if half else []
            choices.append(
                {
                    "index": j,
                    "finish_reason": "abort" if number == self.script.get("abort_at") else "stop",
                    "token_ids": token_ids,
                    "logprobs": {"content": [{"token_id": t, "logprob": p} for t, p in zip(token_ids, logprobs)]},  # noqa: B905
                    "weight_versions": [*spans, {"version": version, "start": half, "end": len(token_ids)}],
                }
            )
        if self.script.get("short"):
            choices[-1]["logprobs"]["content"].pop()
        return web.json_response({"request_id": body["request_id"], "choices": choices})

    async def stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """All children side by side, a token of each at a time."""
        sampling = body["sampling_params"]
        seeds = [sampling["seed"] + j for j in range(sampling["n"])]
        samples = [sample(seed, len(body["token_ids"]), sampling["max_tokens"]) for seed in seeds]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for k in range(max(len(token_ids) for token_ids, _ in samples)):
            fate = self.script.get("fate") if k == self.script.get("stop_after") else None
            if fate == "die":
                os._exit(1)
            if fate == "hang":
                await asyncio.sleep(3600)
            if fate == "skip":
                continue
            for j, (token_ids, logprobs) in enumerate(samples):
                if k < len(token_ids):
                    event = self.event(body, j, k, token_ids, logprobs)
                    for _ in range(2 if fate == "repeat" else 1):
                        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(self.script["token_s"])
        await response.write(b"data: [DONE]\n\n")
        return response

    def event(
        self, body: dict[str, Any], j: int, k: int, token_ids: list[int], logprobs: list[float]
    ) -> dict[str, Any]:
        is_last = k == len(token_ids) - 1 and not self.script.get("endless")
        version = self.script.get("stale", self.script["version"])
        spans = [{"version": version, "start": 0, "end": k + 1}]
        choice = {
            "index": j,
            "finish_reason": ("stop" if token_ids[k] == END else "length") if is_last else None,
            "token_ids": [token_ids[k]],
            "logprobs": {"content": [{"token_id": token_ids[k], "logprob": logprobs[k]}]},
            "weight_versions": spans if is_last or not self.script.get("versions_at_end") else None,
        }
        return {"request_id": body["request_id"], "choices": [choice]}

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        await self.suffer(body)
        choices = []
        for j in range(body["n"]):
            token_ids, logprobs = sample(body["seed"] + j, len(body["prompt"]), body["max_tokens"])
            answer = {"index": j, "finish_reason": "stop", "logprobs": {"token_logprobs": logprobs}}
            choices.append(answer | {"token_ids": token_ids, "text": ""})
        return web.json_response({"choices": choices})

    async def suffer(self, body: dict[str, Any]) -> int:
        """Counts the request and lets it meet its fate."""
        number = len(self.requests)
        self.requests.append(body)
        if number == self.script.get("die_at"):
            os._exit(1)
        if number == self.script.get("hang_at"):
            await asyncio.sleep(3600)
        if number == self.script.get("refuse_at"):
            raise web.HTTPInternalServerError(text="engine is broken")
        slow = self.script.get("slow_token") in body.get("token_ids", ())
        await asyncio.sleep(3600 if slow else self.script["delay_s"])
        return number


def sample(seed: int, start: int, max_tokens: int) -> tuple[list[int], list[float]]:
    """Tokens and log-probs after `start` tokens of context, each a function of the seed and its place."""
    token_ids: list[int] = []
    logprobs: list[float] = []
    while len(token_ids) < max_tokens and END not in token_ids:
        rng = random.Random(f"{seed}/{start + len(token_ids)}")
        token_ids.append(rng.randrange(3, 60) if rng.random() < 0.8 else END)
        logprobs.append(-rng.random())
    return token_ids, logprobs


def refusal(status: int, message: str) -> web.Response:
    error = {"message": message, "type": "Error", "param": None, "code": status}
    return web.json_response({"error": error}, status=status)


async def serve(instance: Instance) -> None:
    """Serves until standard input ends."""
    app = web.Application(middlewares=[instance.watch], client_max_size=2**24)
    app.add_routes(instance.routes())
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(json.dumps({"port": runner.addresses[0][1]}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(serve(Instance(json.loads(sys.argv[1]))))
