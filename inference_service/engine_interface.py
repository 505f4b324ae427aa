"""The interface between the HTTP routes and an inference engine, and the types both use; `app.py` calls it.

An engine generates, pauses, and takes new weights. Every token it returns carries the weight version that sampled it.
All coroutines run in the server's event loop and never block it.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy.typing as npt

from async_rl.errors import AsyncRLError
from async_rl.shared.protocol.inference import InitInfo, SamplingParams, UpdateInfo

PauseMode = Literal["abort", "wait", "keep"]
WakeTag = Literal["weights", "kv_cache", "scheduling"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
FinishReason = Literal["stop", "length", "abort"]


class RequestRefused(ValueError):
    """A request that cannot be served (HTTP 400); `param` names the field that caused it, if there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class OutOfService(AsyncRLError):
    """The instance must not generate now (HTTP 503): an update failed, or the engine's thread died."""


class EngineFault(AsyncRLError):
    """An operation failed inside the engine (HTTP 500)."""


class Sample(NamedTuple):
    """One sampled token.

    `logprob` is in nats; `rank` is 1 for the most likely token; `top` holds (token id, logprob, rank) of the most
    likely tokens, the sampled one first, if the request includes them; `version` is the weight version.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float, int], ...]
    version: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished response, or, in a stream, a delta of one; then `finish_reason` is None until its end.

    `stop_reason` is the request's stop token that ended the response; None for EOS. `routes` come with the end, if the
    request asks for them: see `async_rl.shared.protocol.routed_experts`.
    """

    samples: tuple[Sample, ...]
    finish_reason: FinishReason | None
    stop_reason: int | None
    routes: npt.NDArray[Any] | None = None
    prompt_samples: tuple[Sample, ...] = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the loaded model: prompt plus response at most `max_model_len` tokens, ids below `vocab_size`; whether
    it `has_experts`, whose numbers it can report."""

    max_model_len: int
    vocab_size: int
    has_experts: bool = False


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since start, and current gauges; running and waiting count responses.

    Of the `cache_queries` prompt tokens of all responses that were started, the keys and values of `cache_hits` were in
    the cache or computed for another response.
    """

    num_running: int
    num_waiting: int
    prompt_tokens: int
    generation_tokens: int
    finished: Mapping[FinishReason, int]
    cache_usage: float
    cache_queries: int
    cache_hits: int


class Engine(Protocol):
    """An inference engine behind the routes.

    After a failed weight update `fault` has the reason, and `generate` raises OutOfService until a full update
    succeeds.
    """

    @property
    def limits(self) -> Limits: ...

    @property
    def fault(self) -> str | None: ...

    @property
    def needs_weights(self) -> bool:
        """Whether the fault is a broken weight update, which a full one repairs."""
        ...

    @property
    def is_paused(self) -> bool: ...

    @property
    def weight_version(self) -> str: ...

    @property
    def weight_fingerprint(self) -> str | None: ...

    async def base_digest(self) -> str | None:
        """Of the weights without adapters (`async_rl.shared.weights.fingerprint.base_digest`); None if it has none."""
        ...

    def stats(self) -> EngineStats: ...

    async def generate(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, scores_prompt: bool = False
    ) -> list[Choice]:
        """Samples `params.n` responses; waits for a free slot, and while the engine is paused. Where it `scores_prompt`
        they have the log-probs of the prompt's tokens but the first, under the raw model.

        Cancelling the coroutine cancels the request in the engine.

        Raises:
            RequestRefused: the prompt or a parameter is out of range.
            OutOfService: the instance must not generate.
        """
        ...

    def stream(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[dict[int, Choice], None]:
        """Like `generate`, but as a stream: deltas by the response's index, until all responses have ended.

        A delta is sent with a response's first token, with every `params.stream_interval` more, and at its end. Closing
        the generator cancels the request in the engine. The call itself raises RequestRefused, before anything is
        generated.

        Raises:
            RequestRefused, OutOfService: as `generate`; OutOfService also later, if a weight update breaks meanwhile.
        """
        ...

    def abort(self, request_ids: Sequence[str] | None) -> int:
        """Ends these requests (None: all) immediately with the tokens generated so far; returns their number."""
        ...

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """Stops generation between two steps; new requests wait for `resume`. `wait` first lets running ones finish."""
        ...

    async def resume(self) -> None: ...

    @property
    def is_sleeping(self) -> bool: ...

    async def sleep(self, level: int) -> None:
        """Aborts what is running and pauses; from level 1 on the device's memory is given back. The weights are kept on
        the host, or, at level 2, dropped: it serves again after `wake_up` and a full update."""
        ...

    async def wake_up(self, tags: Sequence[WakeTag]) -> None:
        """Takes memory on the device for the `tags`, all if there are none; resumes, unless weights are missing."""
        ...

    async def init_weight_transfer(self, info: InitInfo) -> None:
        """Joins the trainer's weight group, leaving an earlier one; returns or fails within `info.timeout_s`."""
        ...

    async def start_weight_update(self) -> None: ...

    async def update_weights(self, update: UpdateInfo) -> None:
        """Checks the announced tensors, then receives them into the model; may be called several times per update."""
        ...

    async def finish_weight_update(self, version: str | None) -> None:
        """Puts the received weights into service under `version` and empties every cache."""
        ...


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
    if params.routed_experts and not limits.has_experts:
        raise RequestRefused("the model has no experts to report: leave routed_experts out", "routed_experts")
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
