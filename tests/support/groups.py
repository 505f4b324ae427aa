"""Responses and groups of tests: what a test does not name has a small valid default."""

import random
from collections.abc import Sequence

from async_rl.method.token_arrays import Logprobs, TokenIds
from async_rl.method.types import Group, Prompt, Response, RolloutFacts, WeightSpan, WeightVersion


def make_response(
    token_ids: Sequence[int] = (5, 6),
    text: str = "",
    *,
    logprobs: Sequence[float] | None = None,
    version: WeightVersion = "v0",
    weight_spans: Sequence[WeightSpan] | None = None,
    finish_reason: str = "stop",
    instance: str = "http://a",
    observed: Sequence[tuple[int, int]] = (),
    prompt_ids: Sequence[int] | None = None,
) -> Response:
    """A response whose sampled tokens, those not in `observed`, have log-prob -1 and are all of `version`."""
    num_sampled = len(token_ids) - sum(end - start for start, end in observed)
    return Response(
        token_ids=TokenIds(token_ids),
        logprobs=Logprobs([-1.0] * num_sampled if logprobs is None else logprobs),
        text=text,
        finish_reason=finish_reason,
        weight_spans=(WeightSpan(version, 0, num_sampled),) if weight_spans is None else tuple(weight_spans),
        instance=instance,
        observed=tuple(observed),
        prompt_ids=None if prompt_ids is None else TokenIds(prompt_ids),
    )


def text_responses(*texts: str) -> tuple[Response, ...]:
    """Responses of which only the text matters, as to a reward."""
    return tuple(make_response(text=text) for text in texts)


def make_group(
    index: int = 0,
    responses: Sequence[Response] | None = None,
    *,
    prompt: Prompt | Sequence[int] = (3, 4),
    rewards: Sequence[float] | None = None,
    rollouts: Sequence[RolloutFacts] = (),
    version: WeightVersion = "v0",
    iteration: int = 0,
    started_s: float = 0.0,
    finished_s: float = 1.0,
) -> Group:
    """A group of one response by default; `prompt` may be its token ids, and is then the row "p<index>".

    The rewards of its rollouts are 0, 1, 0, 1 and so on by default. Times are `time.monotonic()` seconds.
    """
    responses = (make_response(version=version),) if responses is None else tuple(responses)
    if rewards is None:
        rewards = [float(i % 2) for i in range(len(rollouts or responses))]
    return Group(
        iteration=iteration,
        index=index,
        prompt=prompt if isinstance(prompt, Prompt) else Prompt(f"p{index}", TokenIds(prompt), {}),
        responses=responses,
        rewards=tuple(rewards),
        rollouts=tuple(rollouts),
        weight_version=version,
        started_s=started_s,
        finished_s=finished_s,
    )


def random_group(
    index: int,
    num_prompt_tokens: int,
    response_lens: Sequence[int],
    rng: random.Random | None = None,
    vocab_size: int = 96,
    rewards: Sequence[float] | None = None,
) -> Group:
    """A group of these lengths in tokens, from `rng`, or a fresh one; its prompt is drawn after its responses.

    No token is 0: transformers gives the embedding of the padding token no gradient.
    """
    draw = rng or random.Random()

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(1, vocab_size) for _ in range(count))

    responses = [make_response(tokens(length)) for length in response_lens]
    return make_group(index, responses, prompt=tokens(num_prompt_tokens), rewards=rewards)
