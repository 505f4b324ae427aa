"""A policy that says what a function says, in place of a pool of instances: what a session calls of `InferencePool`."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from async_rl.method.types import Response, WeightVersion
from async_rl.rollouts.pool.router import Cached
from async_rl.shared.protocol.inference import SamplingParams
from tests.support.agent_tokenizer import END
from tests.support.groups import make_response

Say = Callable[[str, int], str]
"""say(context, seed): what the policy says after the text `context`, without its end."""


class ScriptedPolicy:
    """`before_answering` is awaited before each answer; `num_cancelled` counts those that were not wanted any more."""

    model_tokens = None

    def __init__(self, tokenizer: Any, say: Say, max_model_len: int | None = None) -> None:
        self.max_model_len = max_model_len
        self.say = say
        self.before_answering: Callable[[], Any] = lambda: asyncio.sleep(0)
        self.requests: list[tuple[str, SamplingParams]] = []
        self.num_cancelled = 0
        self._tokenizer = tokenizer

    async def generate_group(
        self,
        context: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        version: WeightVersion,
        expected_tokens: float,
        cached: Cached | None,
    ) -> tuple[tuple[Response, ...], int]:
        text = self._tokenizer.decode(list(context))
        self.requests.append((text, sampling))
        try:
            await self.before_answering()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        assert sampling.seed is not None
        said = self._tokenizer([self.say(text, sampling.seed)], add_special_tokens=False)["input_ids"][0]
        token_ids = (*said, END)[: sampling.max_tokens]
        logprobs = [-(1 + token_id) / 128 for token_id in token_ids]
        reason = "stop" if token_ids[-1] == END else "length"
        return (make_response(token_ids, logprobs=logprobs, version=version, finish_reason=reason),), 1
