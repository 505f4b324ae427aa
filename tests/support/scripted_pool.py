"""A policy without a model, in place of the pool: what it says is a function of the seed, or is given in advance."""

import asyncio
import random
from collections.abc import Callable, Sequence

from async_rl.method.types import Response, WeightVersion
from async_rl.rollouts.pool.router import Cached
from async_rl.shared.protocol.inference import SamplingParams
from tests.support.groups import make_response

END = 1
"""The tokenizer's end of sequence."""


class ScriptedPool:
    """The part of `InferencePool` that a session uses.

    Args:
        says: the tokens after a context, with the seed of the request; by default random ones and an end.
        delay_s: of each response.
    """

    model_tokens = None

    def __init__(
        self,
        says: Callable[[Sequence[int], int], Sequence[int]] | None = None,
        *,
        delay_s: float = 0.0,
        max_model_len: int | None = None,
    ) -> None:
        self.says = says or random_tokens
        self.delay_s = delay_s
        self.max_model_len = max_model_len
        self.asked: list[tuple[tuple[int, ...], SamplingParams]] = []
        self.cached: list[Cached | None] = []
        self.num_cancelled = 0
        self.error: Exception | None = None

    async def generate_group(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        version: WeightVersion,
        expected_tokens: float | None = None,
        cached: Cached | None = None,
    ) -> tuple[list[Response], int]:
        self.asked.append((tuple(prompt_token_ids), sampling))
        self.cached.append(cached)
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        assert sampling.seed is not None
        whole = tuple(self.says(prompt_token_ids, sampling.seed))
        said = whole[: sampling.max_tokens]
        chance = random.Random(sampling.seed)
        return [
            make_response(
                said,
                logprobs=[-chance.random() for _ in said],
                version=version,
                finish_reason="stop" if said == whole else "length",
                instance="http://scripted",
            )
        ], 1


def random_tokens(context: Sequence[int], seed: int) -> list[int]:
    """Letters of the tiny tokenizer, and its end."""
    chance = random.Random(seed)
    return [*(chance.randrange(3, 55) for _ in range(chance.randrange(1, 8))), END]
