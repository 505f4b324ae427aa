"""From an engine's choices to the responses of the generate route, whole or in chunks; the generation routes call it.

The bodies are those of `async_rl.shared.protocol.inference`, but built as plain dicts: pydantic models would cost as
much as sampling the tokens.
"""

import time
from array import array
from base64 import b64encode
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

from pydantic_core import to_json
from typing_extensions import TypedDict

from async_rl.shared.protocol import token_frames
from async_rl.shared.protocol.inference import SamplingParams, Usage
from async_rl.shared.protocol.routed_experts import to_npy
from inference_service.engine_interface import Choice, Sample

LOWEST_LOGPROB: Final = -9999.0
"""Replaces minus infinity, which JSON cannot represent, as in vLLM."""


class TextCodec(Protocol):
    """The two tokenizer calls that text routes need."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str: ...


class Span(TypedDict):
    """`async_rl.shared.protocol.inference.VersionSpan`."""

    version: str
    start: int
    end: int


def generate_response(
    request_id: str, model: str, num_prompt_tokens: int, choices: Sequence[Choice], params: SamplingParams
) -> bytes:
    """A GenerateResponse as JSON."""
    body = {
        "request_id": request_id,
        "model": model,
        "created": int(time.time()),
        "usage": usage(num_prompt_tokens, choices).model_dump(),
        "output_mode": "tokens",
        "choices": [
            _generate_choice(index, choice, params.logprobs, extend_spans([], choice.samples))
            for index, choice in enumerate(choices)
        ],
    }
    return to_json(body)


class GenerateChunks:
    """Builds one streaming response's chunks; keeps the version spans of the tokens sent for each choice."""

    def __init__(self, request_id: str, params: SamplingParams) -> None:
        self._request_id = request_id
        self._num_top = params.logprobs
        self._spans: list[list[Span]] = [[] for _ in range(params.n)]

    def frame(self, deltas: dict[int, Choice]) -> bytes:
        """The same as the payload of a frame of `async_rl.shared.protocol.token_frames`."""
        samples = [sample for choice in deltas.values() for sample in choice.samples]
        choices = [
            token_frames.FramedChoice(
                index,
                len(choice.samples),
                choice.finish_reason,
                self._framed_spans(index, choice),
                None if choice.routes is None else memoryview(to_npy(choice.routes)),
            )
            for index, choice in deltas.items()
        ]
        token_ids = array("i", [sample.token_id for sample in samples])
        logprobs = array("f", [sample.logprob for sample in samples])
        return token_frames.encode(token_frames.Frame(choices, memoryview(token_ids), memoryview(logprobs)))

    def _framed_spans(self, index: int, choice: Choice) -> list[token_frames.Span]:
        spans = extend_spans(self._spans[index], choice.samples)
        return [token_frames.Span(span["version"], span["start"], span["end"]) for span in spans]

    def chunk(self, deltas: dict[int, Choice]) -> bytes:
        """A GenerateChunk as JSON."""
        choices = [
            _generate_choice(index, choice, self._num_top, extend_spans(self._spans[index], choice.samples))
            for index, choice in deltas.items()
        ]
        return to_json({"request_id": self._request_id, "choices": choices})


def extend_spans(spans: list[Span], samples: Iterable[Sample]) -> list[Span]:
    """Extends the version spans of an output by `samples`, which follow it; returns the spans."""
    for sample in samples:
        if spans and spans[-1]["version"] == sample.version:
            spans[-1]["end"] += 1
        else:
            start = spans[-1]["end"] if spans else 0
            spans.append({"version": sample.version, "start": start, "end": start + 1})
    return spans


def usage(num_prompt_tokens: int, choices: Iterable[Choice]) -> Usage:
    num_completion_tokens = sum(len(choice.samples) for choice in choices)
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_completion_tokens,
        total_tokens=num_prompt_tokens + num_completion_tokens,
    )


def _generate_choice(index: int, choice: Choice, num_top: int | None, spans: list[Span]) -> dict[str, Any]:
    """A GenerateChoice, whole or a delta; `spans` are those of its whole output so far."""
    logprobs = None
    if num_top is not None:
        logprobs = {
            "content": [
                {
                    "token_id": sample.token_id,
                    "logprob": sample.logprob,
                    "rank": sample.rank,
                    "top_logprobs": [
                        {"token_id": token_id, "logprob": max(logprob, LOWEST_LOGPROB), "rank": rank}
                        for token_id, logprob, rank in sample.top[:num_top]
                    ],
                }
                for sample in choice.samples
            ]
        }
    body: dict[str, Any] = {
        "index": index,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": [sample.token_id for sample in choice.samples],
        "logprobs": logprobs,
        "weight_versions": spans,
    }
    if choice.routes is not None:
        body["routed_experts"] = b64encode(to_npy(choice.routes)).decode()
    return body
