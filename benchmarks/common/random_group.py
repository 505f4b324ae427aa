"""Groups of random tokens, for benchmarks of the trainer without rollouts."""

import torch

from async_rl.method.token_arrays import Logprobs, TokenIds
from async_rl.method.types import Group, Prompt, Response


def random_group(
    num_prompt_tokens: int, num_response_tokens: int, num_responses: int, vocab_size: int, index: int = 0
) -> Group:
    """A group of one length, from torch's random numbers; every other response has reward 1."""
    tokens = torch.randint(vocab_size, (num_prompt_tokens + num_responses * num_response_tokens,)).tolist()
    prompt, rest = tokens[:num_prompt_tokens], tokens[num_prompt_tokens:]
    responses = tuple(
        Response(
            token_ids=TokenIds(rest[i : i + num_response_tokens]),
            logprobs=Logprobs([0.0] * num_response_tokens),
            text="",
            finish_reason="length",
            weight_spans=(),
            instance="",
        )
        for i in range(0, len(rest), num_response_tokens)
    )
    return Group(
        iteration=0,
        index=index,
        prompt=Prompt("p", TokenIds(prompt), {}),
        responses=responses,
        rewards=tuple(float(i % 2) for i in range(num_responses)),
        weight_version="",
        started_s=0.0,
        finished_s=0.0,
    )
