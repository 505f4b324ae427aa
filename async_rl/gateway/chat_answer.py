"""A turn as an OpenAI chat completion, whole or as the events of a stream; for `server`."""

from collections.abc import Iterator, Mapping
from typing import Any

from async_rl.gateway.answer import Answer, Decode, to_json
from async_rl.gateway.chat_request import ChatRequest


def completion(answer: Answer, request: ChatRequest, decode: Decode) -> dict[str, Any]:
    """The body of a whole answer."""
    message = {**answer.message, "refusal": None}
    if "tool_calls" in message:
        message["content"] = message["content"] or None
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "finish_reason": _finish_reason(answer),
        "logprobs": _logprobs(answer, decode) if request.logprobs else None,
    }
    body = {**_head(answer, request, "chat.completion"), "choices": [choice], "usage": _usage(answer)}
    if request.return_token_ids:
        choice["token_ids"] = list(answer.token_ids)
        body["prompt_token_ids"] = list(answer.prompt_token_ids)
    return body


def completion_events(answer: Answer, request: ChatRequest, decode: Decode) -> Iterator[bytes]:
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
    for index, call in enumerate(answer.calls):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, _finish_reason(answer))
    if request.includes_usage:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def _head(answer: Answer, request: ChatRequest, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": request.model}


def _usage(answer: Answer) -> dict[str, int]:
    num_prompt, num_sampled = len(answer.prompt_token_ids), len(answer.token_ids)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled}


def _finish_reason(answer: Answer) -> str:
    return "tool_calls" if answer.finish_reason == "stop" and answer.calls else answer.finish_reason


def _logprobs(answer: Answer, decode: Decode) -> dict[str, Any]:
    return {"content": answer.logprob_entries(decode), "refusal": None}


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + to_json(body) + b"\n\n"
