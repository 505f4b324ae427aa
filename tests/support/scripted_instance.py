"""A small inference instance that follows a script: `python scripted_instance.py '{"version": "v1"}'`.

It implements the protocol over HTTP in a separate process, prints its port, and ends with its standard input. POST
/script changes the script, GET /seen returns the requests it received. Its responses are a function of the seed, as
with a real engine.

Script keys: version; max_model_len; delay_s before responding; slow_token: prompts with it get no response; die_at,
hang_at, refuse_at, abort_at: the generate request (counted from 0) that fails in this way; serve_generate = false: only
completions; stale: the version it reports; token; health: status of /health; server, owner: of /version and the model
card; boot_id: of the process, null for none; start_time: of its metrics; concurrency: sent in its headers; port: to
listen on; slots: requests that it serves at the same time, others wait; busy_at: requests that get busy_status (503);
mute: /health does not respond.

Streaming, with stream = true: token_s after each token; stop_after: tokens of every response (or of those of the
request fate_of) after which the process ends (fate "die"), or sends no more ("hang"), or breaks the connection
("tear"); versions_at_end: weight versions with the last chunk only, like vLLM; endless: no chunk is marked as the last;
flood: tokens without end; pulse: events without tokens, and comments, without end; surplus: tokens beyond those
requested; bad_logprob: the first log-prob.

endless_body: the route whose response body has no end, with endless_status (200); elsewhere: every route redirects
there.

fenced: every route refuses the trainer's term, as an instance does that another trainer of the run uses now.

needs_weights: /health returns 503 and reports that a full update repairs it.

answers: bodies of whatever content, by route.
"""

import asyncio
import json
import os
import random
import sys
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

DEFAULTS: dict[str, Any] = {
    "version": "v1",
    "max_model_len": 64,
    "delay_s": 0.0,
    "serve_generate": True,
    "health": 200,
    "server": "0.32.0",
    "owner": "async-rl",
    "stream": False,
    "boot_id": "",
    "busy_status": 503,
    "port": 0,
    "token_s": 0.0,
}


END = 1
"""The token that ends a response."""


class Busy(Exception):
    """Carries the status to respond with."""


class Instance:
    def __init__(self, script: dict[str, Any]) -> None:
        self.script = DEFAULTS | script
        self.requests: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.terms: list[str | None] = []
        self.num_cancelled = 0
        self.slots = asyncio.Semaphore(self.script.get("slots", 10**6))

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/script", self.rescript),
            web.get("/seen", self.seen),
            web.get("/health", self.health),
            web.get("/version", self.server_version),
            web.get("/v1/models", self.models),
            web.get("/weight_info", self.weight_info),
            web.get("/metrics", self.metrics),
            web.post("/inference/v1/generate", self.generate),
            web.post("/v1/completions", self.complete),
        ]

    @web.middleware
    async def watch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        token = self.script.get("token")
        if token and request.headers.get("Authorization") != f"Bearer {token}":
            return refusal(401, "a bearer token is needed")
        if request.path not in ("/script", "/seen"):
            self.calls.append(request.path)
            self.terms.append(request.headers.get("X-Async-RL-Term"))
        if self.script.get("fenced") and request.path not in ("/script", "/seen"):
            return refusal(409, "run a is at term 2, this request is of term 1", "term")
        if request.path == "/health" and self.script.get("mute"):
            await asyncio.sleep(3600)
        if request.path == self.script.get("endless_body"):
            return await self.endless(request)
        if request.path in (answers := self.script.get("answers") or {}):
            return web.Response(text=answers[request.path], content_type="application/json", headers=self.identity())
        if "elsewhere" in self.script and request.path not in ("/script", "/seen"):
            raise web.HTTPTemporaryRedirect(self.script["elsewhere"] + request.path)
        try:
            response: web.StreamResponse = await handler(request)
            if not response.prepared:
                response.headers.update(self.identity())
            return response
        except Busy as busy:
            return web.Response(status=busy.args[0], text="the engine is busy")
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    async def endless(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(
            status=self.script.get("endless_status", 200), headers={"Content-Type": "application/json"}
        )
        await response.prepare(request)
        while True:
            await response.write(b" " * 2**20)

    def identity(self) -> dict[str, str]:
        """Headers of every response; `boot_id` "" means one derived from this process."""
        boot_id, told = self.script["boot_id"], self.script.get("concurrency")
        headers = {} if boot_id is None else {"X-Async-RL-Boot-Id": boot_id or f"process-{os.getpid()}"}
        return headers | ({} if told is None else {"X-Async-RL-Max-Concurrency": str(told)})

    async def rescript(self, request: web.Request) -> web.Response:
        self.script |= await request.json()
        return web.json_response({})

    async def seen(self, request: web.Request) -> web.Response:
        seen = {"requests": self.requests, "calls": self.calls, "num_cancelled": self.num_cancelled}
        seen["terms"] = self.terms
        return web.json_response(seen)

    async def health(self, request: web.Request) -> web.Response:
        if self.script.get("needs_weights"):
            error = {"message": "a stream broke", "type": "ServiceUnavailableError", "param": "weights", "code": 503}
            return web.json_response({"error": error}, status=503)
        return web.Response(status=self.script["health"])

    async def server_version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.script["server"]})

    async def models(self, request: web.Request) -> web.Response:
        card = {"id": "tiny", "max_model_len": self.script["max_model_len"], "owned_by": self.script["owner"]}
        return web.json_response({"data": [card]})

    async def weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.script["version"]})

    async def metrics(self, request: web.Request) -> web.Response:
        started = self.script.get("start_time")
        line = f"process_start_time_seconds {started}\n" if started else ""
        return web.Response(text=f"# HELP vllm:x y\n{line}python_info 1.0\n")

    async def generate(self, request: web.Request) -> web.StreamResponse:
        if not self.script["serve_generate"]:
            raise web.HTTPNotFound(text='{"detail":"Not Found"}')
        body = await request.json()
        sampling = body["sampling_params"]
        if len(body["token_ids"]) + sampling["max_tokens"] > self.script["max_model_len"]:
            return refusal(400, "prompt and max_tokens are longer than the model")
        number = await self.suffer(body)
        if self.script["stream"] and body.get("stream"):
            return await self.stream(request, body)
        choices: list[dict[str, Any]] = []
        for j in range(sampling["n"]):
            token_ids, logprobs = answer_to(sampling, j, len(body["token_ids"]))
            if number == self.script.get("abort_at"):
                token_ids, logprobs = token_ids[:1], logprobs[:1]
            version = self.script.get("stale", self.script["version"])
            half = len(token_ids) // 2
            spans = [{"version": self.script["version"], "start": 0, "end": half}] if half else []
            choices.append(
                {
                    "index": j,
                    "finish_reason": "abort"
                    if number == self.script.get("abort_at")
                    else reason_of(token_ids, sampling),
                    "token_ids": token_ids,
                    "logprobs": {"content": [{"token_id": t, "logprob": p} for t, p in zip(token_ids, logprobs)]},  # noqa: B905
                    "weight_versions": [*spans, {"version": version, "start": half, "end": len(token_ids)}],
                }
            )
        return web.json_response({"request_id": body["request_id"], "choices": choices})

    async def stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Streams all children in parallel, one token of each at a time."""
        sampling = body["sampling_params"]
        surplus = self.script.get("surplus", 0)
        samples = [answer_to(sampling, j, len(body["token_ids"]), surplus) for j in range(sampling["n"])]
        if "bad_logprob" in self.script:
            samples = [(token_ids, [self.script["bad_logprob"], *rest]) for token_ids, (_, *rest) in samples]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"} | self.identity())
        await response.prepare(request)
        while self.script.get("pulse"):
            await response.write(b": still there\n\ndata: " + json.dumps({"choices": []}).encode() + b"\n\n")
            await asyncio.sleep(0.05)
        if self.script.get("flood"):
            samples = [([7] * 10**6, [-1.0] * 10**6) for _ in samples]
        async with self.slots:
            await self.send_tokens(request, response, body, samples)
        return response

    async def send_tokens(
        self,
        request: web.Request,
        response: web.StreamResponse,
        body: dict[str, Any],
        samples: list[tuple[list[int], list[float]]],
    ) -> None:
        for k in range(max(len(token_ids) for token_ids, _ in samples)):
            is_meant = body["request_id"] == self.script.get("fate_of", body["request_id"])
            fate = self.script.get("fate") if k == self.script.get("stop_after") and is_meant else None
            if fate == "die":
                os._exit(1)
            if fate == "hang":
                await asyncio.sleep(3600)
            if fate == "tear":
                assert request.transport is not None
                request.transport.abort()
                return
            for j, (token_ids, logprobs) in enumerate(samples):
                if k < len(token_ids):
                    event = self.event(body, j, k, token_ids, logprobs)
                    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(self.script["token_s"])
        await response.write(b"data: [DONE]\n\n")

    def event(
        self, body: dict[str, Any], j: int, k: int, token_ids: list[int], logprobs: list[float]
    ) -> dict[str, Any]:
        is_last = k == len(token_ids) - 1 and not self.script.get("endless")
        version = self.script.get("stale", self.script["version"])
        spans = [{"version": version, "start": 0, "end": k + 1}]
        choice = {
            "index": j,
            "finish_reason": reason_of(token_ids, body["sampling_params"]) if is_last else None,
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
            token_ids, logprobs = answer_to(body, j, len(body["prompt"]))
            answer = {"index": j, "finish_reason": reason_of(token_ids, body), "logprobs": {"token_logprobs": logprobs}}
            choices.append(answer | {"token_ids": token_ids, "text": ""})
        return web.json_response({"choices": choices})

    async def suffer(self, body: dict[str, Any]) -> int:
        """Counts the request and applies the script's failure to it, if any."""
        number = len(self.requests)
        self.requests.append(body)
        if number == self.script.get("die_at"):
            os._exit(1)
        if number == self.script.get("hang_at"):
            await asyncio.sleep(3600)
        if number == self.script.get("refuse_at"):
            raise web.HTTPInternalServerError(text="engine is broken")
        if number in self.script.get("busy_at", ()):
            raise Busy(self.script["busy_status"])
        slow = self.script.get("slow_token") in body.get("token_ids", ())
        await asyncio.sleep(3600 if slow else self.script["delay_s"])
        return number


def seed_of(sampling: dict[str, Any]) -> int:
    """The requested seed, or the instance's default, which is always the same."""
    return int(sampling.get("seed", 0))


def sample(seed: int, start: int, max_tokens: int) -> tuple[list[int], list[float]]:
    """Tokens and log-probs after `start` tokens of context, each a function of the seed and its position."""
    token_ids: list[int] = []
    logprobs: list[float] = []
    while len(token_ids) < max_tokens and END not in token_ids:
        rng = random.Random(f"{seed}/{start + len(token_ids)}")
        token_ids.append(rng.randrange(3, 60) if rng.random() < 0.8 else END)
        logprobs.append(-rng.getrandbits(24) / 2**24)  # a float32, as engines have it
    return token_ids, logprobs


def answer_to(sampling: dict[str, Any], j: int, start: int, surplus: int = 0) -> tuple[list[int], list[float]]:
    """What child j samples, up to a stop token."""
    token_ids, logprobs = sample(seed_of(sampling) + j, start, sampling["max_tokens"] + surplus)
    ends = sampling.get("stop_token_ids") or ()
    length = next((place for place, token in enumerate(token_ids, start=1) if token in ends), len(token_ids))
    return token_ids[:length], logprobs[:length]


def reason_of(token_ids: list[int], sampling: dict[str, Any]) -> str:
    return "stop" if token_ids[-1] in (END, *(sampling.get("stop_token_ids") or ())) else "length"


def refusal(status: int, message: str, param: str | None = None) -> web.Response:
    error = {"message": message, "type": "Error", "param": param, "code": status}
    return web.json_response({"error": error}, status=status)


async def serve(instance: Instance) -> None:
    """Serves until standard input ends."""
    app = web.Application(middlewares=[instance.watch], client_max_size=2**24)
    app.add_routes(instance.routes())
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", instance.script["port"])
    await site.start()
    print(json.dumps({"port": runner.addresses[0][1]}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(serve(Instance(json.loads(sys.argv[1]))))
