"""An instance's answers to generate requests without a server: tokens one at a time, a function of seed and place."""

import asyncio
from collections.abc import Callable, Sequence
from random import Random

from async_rl.errors import InstanceError
from async_rl.method.types import WeightSpan
from async_rl.rollouts.instance.model_tokens import ModelTokens
from async_rl.rollouts.instance.partial_rollout import PartialRollout
from async_rl.rollouts.instance.response_stream import OnProgress
from async_rl.shared.protocol.inference import SamplingParams
from tests.support.scripted_instance import sample

Fault = Callable[[Sequence[PartialRollout]], InstanceError]
"""Makes the error that ends a request, and may take its tokens back."""


class SamplingClient:
    """What a group's rollout calls of `InstanceClient`.

    `next_fault()` says how many tokens the next request gets before it fails, and how; None: it does not.
    """

    def __init__(self, url: str, next_fault: Callable[[], tuple[int, Fault] | None] = lambda: None) -> None:
        self.url = url
        self.streams = True
        self.has_streamed = True
        self.max_concurrency: int | None = None
        self.num_requests = 0
        self.sizes: list[int] = []
        """Responses of each request."""
        self.tells_ends = True
        self._next_fault = next_fault

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        version: str,
        partials: Sequence[PartialRollout],
        *,
        boot_id: str | None = None,
        on_progress: OnProgress | None = None,
        model: ModelTokens | None = None,
    ) -> None:
        self.num_requests += 1
        self.sizes.append(len(partials))
        fault = self._next_fault()
        num_tokens = 0
        while any(partial.finish_reason is None for partial in partials):
            if fault is not None and num_tokens >= fault[0]:
                raise fault[1](partials)
            await asyncio.sleep(0)
            for partial in partials:
                if partial.finish_reason is None:
                    self._extend(partial, len(prompt_token_ids), sampling.max_tokens, version)
                    num_tokens += 1
            if not self.tells_ends:
                raise InstanceError(f"instance {self.url}: the answer ended unfinished")
            if on_progress is not None:
                on_progress(num_tokens, sum(partial.finish_reason is not None for partial in partials))

    def _extend(self, partial: PartialRollout, prompt_length: int, max_tokens: int, version: str) -> None:
        token_ids, logprobs = sample(partial.seed, prompt_length, max_tokens)
        place = len(partial.token_ids)
        partial.token_ids.append(token_ids[place])
        partial.logprobs.append(logprobs[place])
        partial.spans = [WeightSpan(version, 0, place + 1)]
        if place + 1 == len(token_ids) and self.tells_ends:
            partial.finish_reason = "stop" if place + 1 < max_tokens else "length"
            partial.instance = self.url


def faults_of(rng: Random, faults: Sequence[Fault], rate: float) -> Callable[[], tuple[int, Fault] | None]:
    """A fault for so many of the requests, after a few tokens or at once."""
    return lambda: (rng.choice((0, 0, 1, 3, 9)), rng.choice(faults)) if rng.random() < rate else None
