"""A turn in the form of OpenAI's Responses API, whole or as the events of a stream; for `server`.

The output has what the policy thought, then what it said, then its calls: an item each.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from async_rl.parts.gateway.answer import Answer, Decode, to_json
from async_rl.parts.gateway.responses_request import ResponsesRequest


def response_object(answer: Answer, request: ResponsesRequest, decode: Decode) -> dict[str, Any]:
    """The body of a whole answer."""
    head = _head(answer, request)
    output = _output(answer, request, decode)
    if not _is_cut(answer):
        return {**head, "status": "completed", "output": output, "usage": _usage(answer)}
    output[-1]["status"] = "incomplete"
    details = {"reason": "max_output_tokens"}
    return {**head, "status": "incomplete", "incomplete_details": details, "output": output, "usage": _usage(answer)}


def response_events(answer: Answer, request: ResponsesRequest, decode: Decode) -> Iterator[bytes]:
    """The server-sent events of a streamed answer: its finished turn, each part at once."""
    numbers = itertools.count()

    def event(kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": next(numbers), **fields}
        return f"event: {kind}\ndata: ".encode() + to_json(body) + b"\n\n"

    begun = {**_head(answer, request), "status": "in_progress", "output": [], "usage": None}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    whole = response_object(answer, request, decode)
    for index, item in enumerate(whole["output"]):
        yield event("response.output_item.added", output_index=index, item=_empty(item))
        place = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            kind, arguments = "response.function_call_arguments", item["arguments"]
            yield event(f"{kind}.delta", **place, delta=arguments)
            yield event(f"{kind}.done", **place, name=item["name"], arguments=arguments)
        else:
            (part,) = item["content"]
            place["content_index"] = 0
            kind, more = f"response.{part['type']}", {}
            if part["type"] == "output_text":
                more["logprobs"] = part["logprobs"]
            yield event("response.content_part.added", **place, part=_empty(part))
            yield event(f"{kind}.delta", **place, delta=part["text"], **more)
            yield event(f"{kind}.done", **place, text=part["text"], **more)
            yield event("response.content_part.done", **place, part=part)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event(f"response.{whole['status']}", response=whole)


def _output(answer: Answer, request: ResponsesRequest, decode: Decode) -> list[dict[str, Any]]:
    message, done = answer.message, {"status": "completed"}
    output: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        part = {"type": "reasoning_text", "text": message["reasoning_content"]}
        output.append({"type": "reasoning", "id": f"rs_{answer.id}", "summary": [], "content": [part], **done})
    if message["content"] or request.includes_logprobs or not answer.calls:
        logprobs = answer.logprob_entries(decode) if request.includes_logprobs else []
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": logprobs}
        output.append({"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "content": [part], **done})
    for number, call in enumerate(answer.calls):
        ids = {"id": f"fc_{answer.id}_{number}", "call_id": call["id"]}
        output.append({"type": "function_call", **ids, **call["function"], **done})
    return output


def _empty(item: Mapping[str, Any]) -> dict[str, Any]:
    """An item or a part before its first delta."""
    empty: dict[str, Any] = {"text": "", "arguments": "", "content": [], "logprobs": [], "status": "in_progress"}
    return {name: empty.get(name, value) for name, value in item.items()}


def _head(answer: Answer, request: ResponsesRequest) -> dict[str, Any]:
    body = request.body
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": {},
        "model": body.model,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"parameters": None, "strict": None, **tool} for tool in body.tools or ()],
    }


def _is_cut(answer: Answer) -> bool:
    """Whether the policy had more to say; that a limit was reached before is said by the text alone.

    Frameworks take an incomplete response as a failure, and an agent at its limit should end in its own way.
    """
    return answer.finish_reason == "length" and bool(answer.token_ids)


def _usage(answer: Answer) -> dict[str, Any]:
    num_prompt, num_sampled = len(answer.prompt_token_ids), len(answer.token_ids)
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": num_sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + num_sampled,
    }
