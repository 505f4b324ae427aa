"""Checks a request against the loaded model's limits, before it is accepted."""

from collections.abc import Sequence

from async_rl.protocol.inference import SamplingParams
from inference_service.engine_interface import Limits, RequestRefused


def check_request(prompt: Sequence[int], params: SamplingParams, limits: Limits) -> None:
    """Accepts a request that can be generated.

    Raises:
        RequestRefused: it cannot be generated.
    """
    if not prompt:
        raise RequestRefused("the prompt is empty: expected at least one token id", "token_ids")
    outside = next((token for token in prompt if not 0 <= token < limits.vocab_size), None)
    if outside is not None:
        raise RequestRefused(
            f"token id {outside} is out of vocabulary: expected 0 to {limits.vocab_size - 1}", "token_ids"
        )
    if len(prompt) + params.max_tokens > limits.max_model_len:
        raise RequestRefused(
            f"the prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens}, together more than the "
            f"model's maximum of {limits.max_model_len}: shorten the prompt or lower max_tokens",
            "max_tokens",
        )
    if (params.num_continued or 0) >= len(prompt):
        raise RequestRefused(
            f"num_continued is {params.num_continued}, but the prompt, which includes these tokens, has {len(prompt)}: "
            "expected fewer",
            "num_continued",
        )
    if params.min_tokens > params.max_tokens:
        raise RequestRefused(
            f"min_tokens is {params.min_tokens}, more than max_tokens {params.max_tokens}", "min_tokens"
        )
    _check_stops(params, limits)


def _check_stops(params: SamplingParams, limits: Limits) -> None:
    outside = next((token for token in params.stop_token_ids if not 0 <= token < limits.vocab_size), None)
    if outside is not None:
        raise RequestRefused(f"stop_token_ids has {outside}: expected 0 to {limits.vocab_size - 1}", "stop_token_ids")
    if params.min_tokens > 0 and len(set(params.stop_token_ids)) >= limits.vocab_size - 1:
        raise RequestRefused(
            f"stop_token_ids leaves no token that may come before min_tokens {params.min_tokens}: give fewer",
            "stop_token_ids",
        )
