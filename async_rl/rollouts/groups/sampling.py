"""How responses to a prompt are sampled and where they end: the run's settings and those of the prompt's row."""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from async_rl.config.rollout_section import RolloutSection
from async_rl.method.token_arrays import TokenIds
from async_rl.method.types import Prompt, Response, WeightSpan
from async_rl.rollouts.data.prompts import Tokenizer
from async_rl.shared.protocol.inference import SamplingParams

Decode = Callable[[Sequence[Sequence[int]]], list[str]]


@dataclass(frozen=True, slots=True)
class Truncation:
    """Which tokens are sampled from, of evaluations only: the trainer needs samples of the whole distribution.

    `top_p` 1 and `top_k` 0 leave all in.
    """

    top_p: float = 1.0
    top_k: int = 0


ALL_TOKENS = Truncation()


def stops_of(rollout: RolloutSection, prompt: Prompt) -> tuple[str, ...]:
    """Texts that end a response to a prompt."""
    return tuple(dict.fromkeys((*rollout.stop_texts, *prompt.stop)))


def stop_tokens_of(rollout: RolloutSection, prompt: Prompt, *more: int) -> list[int]:
    """Tokens that end a response to a prompt, besides the model's own end of sequence."""
    return list(dict.fromkeys((*rollout.stop_token_ids, *prompt.stop_token_ids, *more)))


def max_tokens_of(rollout: RolloutSection, prompt: Prompt) -> int:
    """The longest response to a prompt: the run's limit, unless its row has a lower one."""
    return min(rollout.max_response_tokens, prompt.max_response_tokens or rollout.max_response_tokens)


def single_turn_sampling(
    rollout: RolloutSection,
    prompt: Prompt,
    *,
    num_responses: int,
    temperature: float,
    seed: int,
    truncation: Truncation = ALL_TOKENS,
    routed_experts: bool = False,
) -> SamplingParams:
    """The request for the responses of a single turn."""
    return SamplingParams(
        n=num_responses,
        max_tokens=max_tokens_of(rollout, prompt),
        temperature=temperature,
        top_p=truncation.top_p,
        top_k=truncation.top_k,
        stop_token_ids=stop_tokens_of(rollout, prompt),
        stop=list(stops_of(rollout, prompt)),
        seed=seed,
        logprobs=0,
        routed_experts=routed_experts or None,
    )


def turn_sampling(
    rollout: RolloutSection,
    prompt: Prompt,
    *,
    max_tokens: int,
    more_stop_tokens: Sequence[int],
    stop: Sequence[str],
    seed: int,
    num_continued: int,
    truncation: Truncation,
    routed_experts: bool = False,
) -> SamplingParams:
    """The request for a turn of a program's rollout; the prompt's last `num_continued` tokens are the turn's first."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=rollout.temperature,
        top_p=truncation.top_p,
        top_k=truncation.top_k,
        stop_token_ids=stop_tokens_of(rollout, prompt, *more_stop_tokens),
        stop=list(stop),
        seed=seed,
        logprobs=0,
        is_turn=True,
        num_continued=num_continued or None,
        routed_experts=routed_experts or None,
    )


def decoder(tokenizer: Tokenizer) -> Decode:
    """The texts of sequences of token ids, without special tokens (end of sequence, a chat template's).

    As arrays, whose elements transformers does not look at one by one: a quarter of the time of lists.
    """

    def decode(sequences: Sequence[Sequence[int]]) -> list[str]:
        arrays = [np.asarray(ids.buffer if isinstance(ids, TokenIds) else ids) for ids in sequences]
        return tokenizer.batch_decode(arrays, skip_special_tokens=True)

    return decode


def with_text(sampled: Sequence[Response], stop: Sequence[str], decode: Decode) -> tuple[Response, ...]:
    """Single-turn responses with their texts, each up to the first of the texts `stop`."""
    ended = [until_stop(response, stop, decode) for response in sampled]
    texts = decode([response.token_ids for response in ended])
    return tuple(replace(response, text=text) for response, text in zip(ended, texts, strict=True))


def until_stop(response: Response, stop: Sequence[str], decode: Decode) -> Response:
    """The response up to the token that completes the first of the texts `stop`.

    An instance stops there itself, but for a text that began before the response was continued elsewhere.
    """

    def has_stop(length: int) -> bool:
        (text,) = decode([response.token_ids[:length]])
        return any(end in text for end in stop)

    if not stop or not has_stop(len(response.token_ids)):
        return response
    length = bisect.bisect_left(range(len(response.token_ids)), True, key=has_stop)
    routes = response.routes
    if routes is not None and length < len(response.token_ids):
        routes = routes[: len(routes) // (len(response.token_ids) - 1) * (length - 1)]
    return replace(
        response,
        token_ids=response.token_ids[:length],
        logprobs=response.logprobs[:length],
        finish_reason="stop",
        routes=routes,
        weight_spans=tuple(
            WeightSpan(span.version, span.start, min(span.end, length))
            for span in response.weight_spans
            if span.start < length
        ),
    )
