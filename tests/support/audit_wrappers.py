"""Faults of `audit_faults.py` that are around the engine's application: each is a wrapper for `audited_engine`."""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.audited_engine import ASGI, given, read_body

JSON = [(b"content-type", b"application/json")]


def other_template(sound: Path) -> Callable[[Any], ASGI]:
    """Answers /tokenize, as vLLM does, with a system prompt that the checkpoint's template does not have."""
    tokenizer = AutoTokenizer.from_pretrained(sound)

    def wrap(app: Any) -> ASGI:
        async def call(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
            if scope["type"] != "http" or scope["path"] != "/tokenize":
                await app(scope, receive, send)
                return
            messages = json.loads(await read_body(receive))["messages"]
            messages = [{"role": "system", "content": "Be brief."}, *messages]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            content = json.dumps({"tokens": tokenizer(text, add_special_tokens=False)["input_ids"]}).encode()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": content})

        return call

    return wrap


def one_of_two(other: AbstractContextManager[str]) -> Callable[[Any], ASGI]:
    """Every second request is answered by another engine, as long as the application lives."""
    stack = ExitStack()
    url = stack.enter_context(other)
    number = [0]

    def wrap(app: Any) -> ASGI:
        async def call(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
            if scope["type"] != "http" or scope["path"] != "/inference/v1/generate":
                await app(scope, receive, send)
                if scope["type"] == "lifespan":
                    stack.close()
                return
            body = await read_body(receive)
            number[0] += 1
            if number[0] % 2:
                await app(scope, given(body, receive), send)
                return
            named = ("content-type", "authorization")
            headers = [(name, value) for name, value in scope["headers"] if name.decode().lower() in named]
            async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
                answer = await client.post(url + scope["path"], content=body, headers=headers)
            await send({"type": "http.response.start", "status": answer.status_code, "headers": JSON})
            await send({"type": "http.response.body", "body": answer.content})

        return call

    return wrap


def kept_prefixes(older: Path, sound: Path, updated: Path) -> Callable[[Any], ASGI]:
    """Keys and values of prompts that came before the file `updated` was there are those of the weights before."""
    old, new = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (older, sound))
    known: set[tuple[int, ...]] = set()

    def answer(prompt: tuple[int, ...], params: Mapping[str, Any]) -> dict[str, Any]:
        with torch.no_grad():
            cache = old(torch.tensor([prompt[:-1]]), use_cache=True).past_key_values
            tokens, content, last = [], [], prompt[-1]
            for _ in range(params["max_tokens"]):
                made = new(torch.tensor([[last]]), past_key_values=cache, use_cache=True)
                logprobs = (made.logits[0, -1] / params["temperature"]).log_softmax(-1)
                last = int(logprobs.exp().multinomial(1))
                tokens.append(last)
                content.append({"token_id": last, "logprob": float(logprobs[last])})
        choice = {"index": 0, "finish_reason": "length", "token_ids": tokens, "logprobs": {"content": content}}
        return {"request_id": "kept", "choices": [choice]}

    def wrap(app: Any) -> ASGI:
        async def call(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
            if scope["type"] != "http" or scope["path"] != "/inference/v1/generate":
                await app(scope, receive, send)
                return
            content = await read_body(receive)
            body = json.loads(content)
            prompt = tuple(body["token_ids"])
            if not updated.exists():
                known.add(prompt)
            if updated.exists() and prompt in known:
                content = json.dumps(answer(prompt, body["sampling_params"])).encode()
                await send({"type": "http.response.start", "status": 200, "headers": JSON})
                await send({"type": "http.response.body", "body": content})
                return

            await app(scope, given(content, receive), send)

        return call

    return wrap
