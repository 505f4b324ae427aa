"""The embedded engine: a transformers model behind the Engine interface (CPU and CUDA).

It uses three threads. The event loop owns the requests, and only it ends them. The generation thread runs the model,
appends tokens to sequences, posts finished ones to the loop, and signals when streams have deltas. The control thread
makes the blocking calls: holding the generation thread between two steps, and receiving weights.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from collections.abc import Sequence as Listing
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import torch

from async_rl.shared.protocol.inference import InitInfo, SamplingParams, UpdateInfo
from inference_service.engine.batching import Batching
from inference_service.engine.cache_size import CacheSize
from inference_service.engine.kernels import FASTEST, Kernels
from inference_service.engine.model import LoadedModel
from inference_service.engine.sequences import Request, Sequence
from inference_service.engine.stop_texts import StopTexts
from inference_service.engine_interface import (
    Choice,
    EngineFault,
    EngineStats,
    FinishReason,
    Limits,
    LogprobsMode,
    OutOfService,
    PauseMode,
    RequestRefused,
    WakeTag,
    check_request,
)
from inference_service.weight_transfer.weight_update import Phase, WeightUpdate

INTERVAL_S: Final = 0.025
"""Long compared with a step of a small model, short compared with any client's waiting time."""


class StreamWaker:
    """Wakes the requests that stream, in intervals: waking each for each token would cost more than generating it.

    So everything that happens within `INTERVAL_S` is sent at once, for all streams, which also combines the deltas of
    concurrent responses into one chunk. `requests` is the engine's own collection, read in the event loop; `ring` may
    be called by any thread.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests = requests
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rung = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def note_step(self, sampled: list[Sequence]) -> None:
        """Called with the sequences that received a token in this step."""
        if not self._rung and any(sequence.has_delta for sequence in sampled):
            self.ring()

    def ring(self) -> None:
        if self._rung:
            return
        assert self._loop is not None, "the engine was not started"
        self._rung = True
        self._loop.call_soon_threadsafe(self._loop.call_later, INTERVAL_S, self._wake)

    def _wake(self) -> None:
        # Reset first: samples added from here on ring again.
        self._rung = False
        for request in self._requests:
            request.wake_if_news()


T = TypeVar("T")

STOP_TIMEOUT_S: Final = 1.0


class TransformersEngine:
    """Implements `engine_interface.Engine`. Create it anywhere; call `start` and everything else in the event loop."""

    def __init__(
        self, loaded: LoadedModel, size: CacheSize, max_model_len: int, mode: LogprobsMode, kernels: Kernels = FASTEST
    ) -> None:
        self._eos_ids = loaded.eos_ids
        self._codec = loaded.codec
        self._requests: set[Request] = set()
        self._waker = StreamWaker(self._requests)
        self._batching = Batching(
            loaded.model, size, mode, self._waker.note_step, self._post_finished, self._post_failed, kernels
        )
        self._limits = Limits(max_model_len, int(loaded.model.config.vocab_size), self._batching.has_routes)
        self._device = loaded.model.device
        self._update = WeightUpdate(loaded.model)
        self._paused = self._update.is_sleeping
        self._max_concurrency = size.max_concurrency
        self._control = ThreadPoolExecutor(1, thread_name_prefix="engine-control")
        self._holding = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner: dict[Sequence, Request] = {}
        self._num_unnamed_versions = 0
        self._prompt_tokens = 0
        self._finished: Counter[FinishReason] = Counter()

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waker.start(self._loop)
        self._batching.start()

    def close(self) -> None:
        """Ends the generation thread, within about a second unless a single step takes longer."""
        self._batching.stop(STOP_TIMEOUT_S)
        self._control.shutdown(wait=False, cancel_futures=True)

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def fault(self) -> str | None:
        return self._batching.fault or self._update.fault

    @property
    def death(self) -> str | None:
        """Why its generation thread died; only another process serves again."""
        return self._batching.fault

    @property
    def needs_weights(self) -> bool:
        return self._batching.fault is None and self._update.fault is not None

    @property
    def is_paused(self) -> bool:
        return self._paused

    @property
    def weight_version(self) -> str:
        return self._batching.version

    @property
    def weight_fingerprint(self) -> str | None:
        return self._update.fingerprint

    async def base_digest(self) -> str | None:
        return await self._block(self._update.base_digest)

    def stats(self) -> EngineStats:
        unfinished = {True: 0, False: 0}
        for request in self._requests:
            unfinished[request.submitted] += len(request.unfinished())
        num_running = min(unfinished[True], self._max_concurrency)
        return EngineStats(
            num_running=num_running,
            num_waiting=unfinished[True] + unfinished[False] - num_running,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._batching.num_sampled,
            finished=dict(self._finished),
            cache_usage=self._batching.cache_usage,
            cache_queries=self._batching.num_asked,
            cache_hits=self._batching.num_known,
        )

    # Requests

    async def generate(
        self, request_id: str, prompt: Listing[int], params: SamplingParams, scores_prompt: bool = False
    ) -> list[Choice]:
        self._require_possible(prompt, params)
        request = self._open(request_id, tuple(prompt), params)
        for sequence in request.sequences:
            sequence.scores_prompt = scores_prompt
        try:
            if not self._paused:
                self._submit(request)
            await request.done
        finally:
            self._close(request)
        self._count(request)
        return [sequence.choice() for sequence in request.sequences]

    def stream(
        self, request_id: str, prompt: Listing[int], params: SamplingParams
    ) -> AsyncGenerator[dict[int, Choice], None]:
        self._require_possible(prompt, params)
        return self._stream(request_id, tuple(prompt), params)

    async def _stream(
        self, request_id: str, prompt: tuple[int, ...], params: SamplingParams
    ) -> AsyncGenerator[dict[int, Choice], None]:
        request = self._open(request_id, prompt, params)
        request.delta_ready = asyncio.Event()
        for sequence in request.sequences:
            sequence.due_at = 1
        try:
            if not self._paused:
                self._submit(request)
            while not request.done.done():
                await request.delta_ready.wait()
                request.delta_ready.clear()
                if deltas := request.take_delta():
                    yield deltas
            request.done.result()
            if deltas := request.take_delta():
                yield deltas
        finally:
            self._close(request)
        self._count(request)

    def _require_possible(self, prompt: Listing[int], params: SamplingParams) -> None:
        check_request(prompt, params, self._limits)
        if params.stop and self._codec is None:
            raise RequestRefused("the model has no tokenizer, so texts cannot end a response: leave stop out", "stop")
        self._require_service()

    def _require_service(self) -> None:
        fault = self.fault or ("it sleeps, without weights" if self._update.phase is Phase.ASLEEP else None)
        if fault is not None:
            raise OutOfService(fault)

    def _open(self, request_id: str, prompt: tuple[int, ...], params: SamplingParams) -> Request:
        self._require_service()
        seed = random.getrandbits(64) if params.seed is None else params.seed
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        num_continued = params.num_continued or 0
        stop = StopTexts(params.stop, self._codec) if params.stop and self._codec is not None else None
        sequences = [Sequence(prompt, params, seed + j, stop_ids, num_continued, stop) for j in range(params.n)]
        request = Request(request_id, sequences, asyncio.get_running_loop().create_future())
        self._requests.add(request)
        self._owner.update((sequence, request) for sequence in sequences)
        self._prompt_tokens += len(prompt)
        return request

    def _submit(self, request: Request) -> None:
        request.submitted = True
        self._batching.submit(request.sequences)

    def _close(self, request: Request) -> None:
        self._batching.cancel(request.unfinished())
        self._requests.discard(request)
        for sequence in request.sequences:
            del self._owner[sequence]
        # A client that is gone: a pause may wait for its request. It does nothing to one that has ended.
        request.done.cancel()

    def _count(self, request: Request) -> None:
        for sequence in request.sequences:
            assert sequence.finish_reason is not None, "a request ended before its sequences"
            self._finished[sequence.finish_reason] += 1

    def abort(self, request_ids: Listing[str] | None) -> int:
        wanted = None if request_ids is None else set(request_ids)
        aborted = [r for r in self._requests if wanted is None or r.request_id in wanted]
        for request in aborted:
            unfinished = request.unfinished()
            self._batching.cancel(unfinished)
            for sequence in unfinished:
                sequence.end(sequence.natural_end or "abort")
            request.end_if_complete()
        return len(aborted)

    def _fail_all(self, error: Exception) -> None:
        for request in self._requests:
            self._batching.cancel(request.unfinished())
            request.fail(error)

    # Called by the generation thread

    def _post_finished(self, finished: list[tuple[Sequence, str | None]]) -> None:
        assert self._loop is not None, "the engine was not started"
        self._loop.call_soon_threadsafe(self._end_sequences, finished)

    def _post_failed(self, failed: list[Sequence]) -> None:
        error = (
            "the model's logits are not finite: its weights are damaged, publish sound ones; if every instance says "
            "so, those of the trainer have diverged (lower optimizer.learning_rate, and begin before that)"
        )
        self._post_finished([(sequence, error) for sequence in failed])

    def _end_sequences(self, finished: list[tuple[Sequence, str | None]]) -> None:
        for sequence, error in finished:
            request = self._owner.get(sequence)
            if request is None or sequence.finish_reason is not None:
                continue
            if error is not None:
                request.fail(EngineFault(error))
                continue
            reason = sequence.natural_end
            assert reason is not None, "a sequence was posted before its end"
            sequence.end(reason)
            request.end_if_complete()
            if sequence.has_delta:
                self._waker.ring()

    # Pause, sleep and weights

    async def _block(self, call: Callable[..., T], *args: object) -> T:
        """Runs blocking calls in the control thread, one at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._control, call, *args)

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        running = [request for request in self._requests if request.submitted]
        if mode == "wait" and self._paused and running:
            raise RequestRefused("paused with frozen requests, which will never finish: resume first", "mode")
        self._paused = True
        if mode == "abort":
            self.abort(None)
        elif mode == "wait" and running:
            await asyncio.wait([request.done for request in running])
        async with self._holding:
            # Another call may have resumed while this one waited.
            if self._paused:
                await self._block(self._batching.hold)
                if clear_cache and self._update.phase is not Phase.UPDATING:
                    self._batching.empty_caches()

    async def resume(self) -> None:
        async with self._holding:
            if self._update.phase is Phase.UPDATING:
                raise RequestRefused("a weight update is going on: finish it before resuming")
            if self._update.is_sleeping:
                raise RequestRefused("the instance sleeps: call /wake_up before resuming")
            self._fail_if_broken()
            self._paused = False
            await self._block(self._batching.release)
            for request in [r for r in self._requests if not r.submitted and not r.done.done()]:
                self._submit(request)

    @property
    def is_sleeping(self) -> bool:
        return self._update.is_sleeping

    async def sleep(self, level: int) -> None:
        async with self._holding:
            if level < 2 and self._update.phase is Phase.UPDATING:
                raise RequestRefused("a weight update is going on: finish it before the instance sleeps")
            self._paused = True
            self.abort(None)
            await self._block(self._batching.hold)
            if level == 0:
                return
            self._batching.empty_caches()
            await self._block(lambda: self._update.sleep(keeps=level == 1))
            self._give_back()

    def _give_back(self) -> None:
        """To the device, what its allocator holds in reserve."""
        if self._device.type != "cpu":
            torch.get_device_module(self._device).empty_cache()

    async def wake_up(self, tags: Listing[WakeTag]) -> None:
        async with self._holding:
            # Keys and values get memory as they come, and empty caches need none.
            if not tags or "weights" in tags:
                try:
                    await self._block(self._update.wake)
                except EngineFault:
                    self._give_back()
                    raise
            can_serve = self._update.phase is Phase.SERVING and not self._update.is_sleeping
        if can_serve and tuple(tags) != ("weights",):
            await self.resume()

    async def init_weight_transfer(self, info: InitInfo) -> None:
        try:
            await self._block(self._update.join, info)
        finally:
            self._fail_if_broken()

    async def start_weight_update(self) -> None:
        # No call may resume before the update has begun: weights would change amid a step.
        async with self._holding:
            if not self._paused:
                raise RequestRefused("generation is not paused: call /pause before /start_weight_update")
            await self._block(self._batching.hold)
            await self._block(self._update.start)

    async def update_weights(self, update: UpdateInfo) -> None:
        try:
            await self._block(self._update.receive, update)
        finally:
            self._fail_if_broken()

    async def finish_weight_update(self, version: str | None) -> None:
        # No call may resume between the new weights and the emptying of the caches.
        async with self._holding:
            try:
                await self._block(self._update.finish)
            finally:
                self._fail_if_broken()
            self._batching.empty_caches()
            if version is None:
                self._num_unnamed_versions += 1
                version = f"unnamed-{self._num_unnamed_versions}"
            self._batching.version = version

    def _fail_if_broken(self) -> None:
        """Fails waiting and frozen requests: they must not continue with broken weights, nor wait for an update."""
        if self._update.fault is not None:
            self._fail_all(OutOfService(self._update.fault))
