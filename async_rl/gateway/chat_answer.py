"""A turn as an OpenAI chat completion, whole or as the events of a stream; for `server`."""

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from async_rl.gateway.chat_request import ChatRequest
from async_rl.rollout.session import Turn

AT_LIMIT = "The limit of this conversation is reached."

Decode = Callable[[Sequence[int]], Sequence[str]]
"""The text of each of some tokens."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client gets. `token_ids` and `logprobs` are of the sampled tokens."""

    message: Mapping[str, Any]
    finish_reason: str
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, turn: Turn) -> "Answer":
        calls = turn.finish_reason == "stop" and "tool_calls" in turn.message
        return cls(
            turn.message,
            "tool_calls" if calls else turn.finish_reason,
            turn.prompt_token_ids,
            turn.token_ids,
            turn.logprobs,
        )

    @classmethod
    def without_room(cls) -> "Answer":
        """What a rollout at its limit still gets; it is not the policy's, and not trained.

        With a text, since some frameworks take an answer without any as a fault of the server.
        """
        return cls({"role": "assistant", "content": AT_LIMIT}, "length", (), (), ())


def completion(answer: Answer, request: ChatRequest, decode: Decode) -> dict[str, Any]:
    """The body of a whole answer."""
    message = {**answer.message, "refusal": None}
    if "tool_calls" in message:
        message["content"] = message["content"] or None
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "finish_reason": answer.finish_reason,
        "logprobs": _logprobs(answer, decode) if request.logprobs else None,
    }
    body = {**_head(answer, request, "chat.completion"), "choices": [choice], "usage": _usage(answer)}
    if request.return_token_ids:
        choice["token_ids"] = list(answer.token_ids)
        body["prompt_token_ids"] = list(answer.prompt_token_ids)
    return body


def events(answer: Answer, request: ChatRequest, decode: Decode) -> Iterator[bytes]:
    """The server-sent events of a streamed answer: its finished turn, in OpenAI's deltas."""
    head = _head(answer, request, "chat.completion.chunk")

    def chunk(
        delta: Mapping[str, Any], finish_reason: str | None = None, logprobs: Mapping[str, Any] | None = None
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return _event({**head, "choices": [choice]})

    yield chunk({"role": "assistant", "content": ""})
    if answer.message.get("reasoning_content"):
        yield chunk({"reasoning_content": answer.message["reasoning_content"]})
    if answer.message["content"] or request.logprobs:
        logprobs = _logprobs(answer, decode) if request.logprobs else None
        yield chunk({"content": answer.message["content"]}, logprobs=logprobs)
    for index, call in enumerate(answer.message.get("tool_calls", ())):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, answer.finish_reason)
    if request.includes_usage:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def _head(answer: Answer, request: ChatRequest, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": request.model}


def _usage(answer: Answer) -> dict[str, int]:
    num_prompt, num_sampled = len(answer.prompt_token_ids), len(answer.token_ids)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled}


def _logprobs(answer: Answer, decode: Decode) -> dict[str, Any]:
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(decode(answer.token_ids), answer.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
