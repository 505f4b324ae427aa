"""From an engine's choices to the bodies of the wire; called by the routes that generate."""

import time
from collections.abc import Sequence
from typing import Final, Protocol

from async_rl.protocol import (
    ChoiceLogprobs,
    GenerateChoice,
    GenerateResponse,
    SamplingParams,
    TokenLogprob,
    TokenLogprobContent,
    Usage,
    VersionSpan,
)
from inference_service.bodies import CompletionChoice, CompletionLogprobs
from inference_service.engine import Choice, Sample

LOWEST_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON has no number for, as in vLLM."""


class TextCodec(Protocol):
    """The two calls of a tokenizer that text routes need."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str: ...


def generate_response(
    request_id: str, model: str, num_prompt_tokens: int, choices: Sequence[Choice], params: SamplingParams
) -> GenerateResponse:
    return GenerateResponse(
        request_id=request_id,
        model=model,
        created=int(time.time()),
        usage=usage(num_prompt_tokens, choices),
        choices=[_generate_choice(index, choice, params.logprobs) for index, choice in enumerate(choices)],
    )


def usage(num_prompt_tokens: int, choices: Sequence[Choice]) -> Usage:
    num_completion_tokens = sum(len(choice.samples) for choice in choices)
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_completion_tokens,
        total_tokens=num_prompt_tokens + num_completion_tokens,
    )


def version_spans(samples: Sequence[Sample]) -> list[VersionSpan]:
    """Runs of one weight version over the output's token indexes; together they cover it without gaps."""
    bounds = [i for i in range(len(samples)) if i == 0 or samples[i].version != samples[i - 1].version]
    ends = [*bounds[1:], len(samples)]
    return [
        VersionSpan(version=samples[start].version, start=start, end=end)
        for start, end in zip(bounds, ends, strict=False)
    ]


def _generate_choice(index: int, choice: Choice, num_top: int | None) -> GenerateChoice:
    # The tokens come from our own engine: checking every one of them again would cost more than sampling it.
    content = None
    if num_top is not None:
        content = [
            TokenLogprobContent.model_construct(
                token_id=sample.token_id,
                logprob=sample.logprob,
                rank=sample.rank,
                top_logprobs=[_token_logprob(*entry) for entry in sample.top[:num_top]],
            )
            for sample in choice.samples
        ]
    return GenerateChoice(
        index=index,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        token_ids=[sample.token_id for sample in choice.samples],
        logprobs=None if content is None else ChoiceLogprobs.model_construct(content=content),
        weight_versions=version_spans(choice.samples),
    )


def _token_logprob(token_id: int, logprob: float, rank: int) -> TokenLogprob:
    return TokenLogprob(token_id=token_id, logprob=max(logprob, LOWEST_LOGPROB), rank=rank)


def completion_choice(
    index: int,
    choice: Choice,
    codec: TextCodec | None,
    num_top: int | None,
    prompt: Sequence[int] | None,
    tokens_as_ids: bool,
) -> CompletionChoice:
    """One choice of `/v1/completions`; `prompt` is given when the request asked for token ids."""
    token_ids = [sample.token_id for sample in choice.samples]
    return CompletionChoice(
        index=index,
        text="" if codec is None else codec.decode(token_ids, skip_special_tokens=True),
        logprobs=None if num_top is None else _completion_logprobs(choice.samples, codec, tokens_as_ids),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        token_ids=None if prompt is None else token_ids,
        prompt_token_ids=None if prompt is None else list(prompt),
    )


def _completion_logprobs(samples: Sequence[Sample], codec: TextCodec | None, tokens_as_ids: bool) -> CompletionLogprobs:
    def text(token_id: int) -> str:
        if tokens_as_ids or codec is None:
            return f"token_id:{token_id}"
        return codec.decode([token_id], skip_special_tokens=False)

    tokens = [text(sample.token_id) for sample in samples]
    offsets = [0]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    return CompletionLogprobs(
        text_offset=offsets[:-1],
        token_logprobs=[sample.logprob for sample in samples],
        tokens=tokens,
        top_logprobs=[
            {text(token_id): max(logprob, LOWEST_LOGPROB) for token_id, logprob, _ in sample.top}
            or {token: sample.logprob}
            for token, sample in zip(tokens, samples, strict=True)
        ],
    )
