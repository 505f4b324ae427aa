"""One inference instance over HTTP: the trainer's side of `async_rl.shared.protocol.inference`.

Every method runs on one event loop, and ends within its timeout with a result or an `InstanceError` that names the
instance. No method retries: the pool and the publisher decide about that.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Literal

import aiohttp
from pydantic import BaseModel

from async_rl.errors import InstanceError, InstanceRefused, InstanceStalled, InstanceTooSlow, StaleWeights
from async_rl.method.types import WeightVersion
from async_rl.rollouts.instance import update_calls
from async_rl.rollouts.instance.answer_bytes import event_payloads, frame_payloads, whole_body
from async_rl.rollouts.instance.connections import Connections
from async_rl.rollouts.instance.dialect import (
    MODELS,
    RPC,
    VERSION,
    WEIGHT_INFO,
    WORLD_SIZE,
    Dialect,
    LoadAdapterRequest,
    Model,
    UnloadAdapterRequest,
    completion_request,
    dialect_of,
    generate_request,
)
from async_rl.rollouts.instance.http import (
    MAX_BODY_BYTES,
    UNBOUNDED,
    InstanceHttp,
    RouteMissing,
    while_it_progresses,
    within,
)
from async_rl.rollouts.instance.model_tokens import ModelTokens, SampledTokens
from async_rl.rollouts.instance.partial_rollout import PartialRollout, request_of
from async_rl.rollouts.instance.response_stream import ExpectedRoutes, OnProgress, ResponseStream
from async_rl.shared.protocol import inference, routes, token_frames
from async_rl.shared.protocol.inference import SamplingParams
from async_rl.shared.protocol.sequence import Answer, Call

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 10.0

CONFIRM_TIMEOUT_S = 3.0
"""For reading version and boot id again after an interrupted response: a lost instance must not delay its group."""

EVENTS = "text/event-stream"
ACCEPTED = {"Accept": f"{token_frames.MEDIA_TYPE}, {EVENTS}, application/json"}


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Which weights an instance reports to hold, and which process reports it; see `routes.BOOT_ID_HEADER`."""

    version: WeightVersion
    boot_id: str | None


class InstanceClient:
    """Client of the instance at `url`; a generation ends when it makes no progress for `request_timeout_s`."""

    def __init__(self, connections: Connections, url: str, request_timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._dialect: Dialect | None = None
        self.max_concurrency: int | None = None
        """How many responses it generates concurrently, if it reports that; known after `learn_dialect`."""
        self.server = ""
        """Its release, as found by `learn_dialect`."""
        self.streams = True
        """Whether it responds to generate requests token by token, as far as observed."""
        self.has_streamed = False
        """Whether it has ever done so."""
        self._connections = connections
        self._http = InstanceHttp(connections, self.url)
        self._request_timeout_s = request_timeout_s
        self._adapter: str | None = None
        """What requests name, where it loads adapters by itself."""
        self._last_received_s = 0.0
        """`time.monotonic()` of the last tokens of any request."""

    @property
    def dialect(self) -> Dialect:
        """The result of `learn_dialect`. A guess would do harm silently: a server that takes its noise from the seed
        and gets none draws other samples."""
        assert self._dialect is not None, f"instance {self.url} was not asked yet what it speaks"
        return self._dialect

    @property
    def knows_its_server(self) -> bool:
        """Whether `learn_dialect` has succeeded."""
        return self._dialect is not None

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        version: WeightVersion,
        partials: Sequence[PartialRollout],
        *,
        boot_id: str | None = None,
        on_progress: OnProgress | None = None,
        model: ModelTokens | None = None,
    ) -> None:
        """Completes the partial rollouts, all of weight version `version`; received tokens stay, also if it fails.

        Uses the generate route, whose response proves the version of each token. If the server lacks it, uses
        completions with token ids, and reads the version before and after.

        Args:
            partials: of one prompt; see `request_of`.
            boot_id: of the process that was put in service with this version; tokens of another process are refused.
            on_progress: called with the tokens and the finished responses that each event brought.
            model: what the tokens are compared with, if anything.

        Raises:
            InstanceUnreachable, InstanceRefused: see errors.py.
            InstanceStalled: no token of any request arrived for `request_timeout_s`.
            InstanceTooSlow: no token of this request arrived for that time, while other requests progressed.
            StaleWeights: a token was sampled from other weights, or by another process; it is not kept.
            BrokenAnswer: it is no valid sample of the request; no part of it is kept.
            InstanceError: the response is incomplete or malformed, or the request was aborted.
        """
        began_s = time.monotonic()
        reports_versions = self.dialect.has_generate
        tokens = SampledTokens(model, sampling)
        expected = None
        if sampling.routed_experts:
            expected = ExpectedRoutes(len(prompt_token_ids), None if model is None else model.routes)
        answer = ResponseStream(
            self.url, partials, version, reports_versions, sampling.max_tokens, tokens, boot_id, on_progress, expected
        )

        def last_progress_s() -> float:
            # Before its first token, it may wait in the instance's queue, behind requests that progress.
            return max(began_s, answer.last_received_s or self._last_received_s)

        try:
            async with while_it_progresses(last_progress_s, self._request_timeout_s):
                await self._ask(prompt_token_ids, sampling, request_id, answer)
        except TimeoutError as error:
            slow = f"instance {self.url} made no token of a request for {self._request_timeout_s:g} s"
            if self._last_received_s > time.monotonic() - self._request_timeout_s:
                raise InstanceTooSlow(f"{slow}, after {answer.num_tokens} of it") from error
            raise InstanceStalled(f"{slow}, nor of any other one") from error
        except StaleWeights:
            answer.take_back_unproven()
            raise
        finally:
            await self._prove_rest(answer)

    async def _ask(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, request_id: str, answer: ResponseStream
    ) -> None:
        by_position = self.dialect.noise_by_position
        prompt, params = request_of(prompt_token_ids, sampling, answer.partials, noise_by_position=by_position)
        if self.dialect.has_generate:
            try:
                await self._read(routes.GENERATE, generate_request(prompt, params, request_id, self._adapter), answer)
            except RouteMissing as error:
                logger.info("%s; using %s", error, routes.COMPLETIONS)
                self._dialect = replace(self.dialect, has_generate=False)
        if not self.dialect.has_generate:
            if self._adapter is not None:
                raise InstanceError(f"instance {self.url} has no {routes.GENERATE}, by which adapters are named")
            answer.reports_versions = False
            await self._require_holding(answer)
            await self._read(routes.COMPLETIONS, completion_request(prompt, params, request_id), answer)
            await self._require_holding(answer)
            answer.confirm_version()
        answer.require_complete()

    async def _read(self, path: str, body: BaseModel, answer: ResponseStream) -> None:
        """POSTs a request and feeds `answer` with the response, in events or as a whole."""
        try:
            session = self._connections.generating
            data = body.model_dump_json(exclude_none=True).encode()
            asked = session.post(self.url + path, data=data, headers=ACCEPTED, timeout=UNBOUNDED, allow_redirects=False)
            async with asked as response:
                answer.came_from(self._http.boot_id(response.headers))
                if response.status != 200:
                    refusal = await whole_body(response.content, MAX_BODY_BYTES, self.url)
                    response.close()
                    self._http.refuse("POST", path, response.status, refusal)
                has_frames = response.content_type == token_frames.MEDIA_TYPE
                self.streams = has_frames or response.content_type == EVENTS
                if self.streams:
                    self.has_streamed = True
                    payloads = frame_payloads if has_frames else event_payloads
                    async for payload in payloads(response.content, answer.max_bytes, self.url):
                        self._feed(answer, payload, has_frames)
                else:
                    self._feed(answer, await whole_body(response.content, answer.max_bytes, self.url))
        except (aiohttp.ClientError, OSError) as error:
            raise self._http.unreachable("POST", path, error) from error

    def _feed(self, answer: ResponseStream, payload: bytes, is_frame: bool = False) -> None:
        num_before = answer.num_tokens
        answer.feed_frame(payload) if is_frame else answer.feed(payload)
        if answer.num_tokens > num_before:
            self._last_received_s = time.monotonic()

    async def _prove_rest(self, answer: ResponseStream) -> None:
        """Keeps an interrupted response's tokens if version and process prove their weights; removes them otherwise.

        A server that reports versions only with its last chunk has not reported them. The response headers may name the
        process that generated it, which was put in service with this version. Version and boot id are read again: the
        process may now hold other weights, sent by another program; if another process responds, or none, only those
        headers are proof.
        """
        if not answer.has_unproven:
            return
        is_proven = False
        try:
            is_proven = await self._is_proven(answer)
        finally:
            # Also after a cancellation: a partial rollout must not keep tokens of unknown weights.
            if is_proven:
                answer.confirm_version()
            else:
                answer.take_back_unproven()

    async def _is_proven(self, answer: ResponseStream) -> bool:
        if answer.boot_id is not None:
            try:
                held = await self.holding(CONFIRM_TIMEOUT_S)
            except InstanceError as error:
                logger.debug("%s", error)
            else:
                if held.boot_id == answer.boot_id:
                    return held.version == answer.version
        return answer.is_of_process_in_service

    async def learn_dialect(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Queries what the server is; called again after it may have been replaced by another one."""
        answer, headers = await self._http.exchange("GET", routes.VERSION, None, within(timeout_s))
        version = self._http.parse(VERSION, answer, routes.VERSION)["version"]
        self._dialect = dialect_of(version, (await self._model(timeout_s)).get("owned_by"))
        reported = headers.get(routes.MAX_CONCURRENCY_HEADER, "")
        is_number = reported.isdecimal() and 0 < len(reported) < 9
        self.max_concurrency = (int(reported) or None) if is_number else None
        self.server = version
        self._http.takes_sequences = True

    async def health(self, timeout_s: float = CONTROL_TIMEOUT_S) -> str | None:
        """The boot id in a healthy instance's response, if any; InstanceRefused with status 503 if it runs but cannot
        serve."""
        _, headers = await self._http.exchange("GET", routes.HEALTH, None, within(timeout_s))
        return self._http.boot_id(headers)

    async def holding(self, timeout_s: float = CONTROL_TIMEOUT_S) -> HeldWeights:
        """Which weights it holds and which process it is: from one response, or else the process is queried last, so
        that a restart in between cannot be mistaken for the process that held them."""
        version, headers = await self._held_version(timeout_s)
        boot_id = self._http.boot_id(headers)
        return HeldWeights(version, boot_id if boot_id is not None else await self._http.start_time(timeout_s))

    async def _held_version(self, timeout_s: float) -> tuple[WeightVersion, Mapping[str, str]]:
        """The version, of all workers if they differ, and the headers of the response that has it."""
        if self.dialect.keeps_version:
            answer, headers = await self._http.exchange("GET", routes.WEIGHT_INFO, None, within(timeout_s))
            return self._http.parse(WEIGHT_INFO, answer, routes.WEIGHT_INFO)["weight_version"], headers
        results, headers = await self._ask_workers(routes.NOTED_VERSION_METHOD, [], timeout_s)
        return _agreed(results), headers

    async def max_model_len(self, timeout_s: float = CONTROL_TIMEOUT_S) -> int:
        """The maximum of prompt plus response tokens of the served model."""
        length = (await self._model(timeout_s)).get("max_model_len")
        if length is None:
            raise InstanceError(f"instance {self.url} does not say its max_model_len: its {routes.MODELS} lacks it")
        return length

    async def _model(self, timeout_s: float) -> Model:
        models = self._http.parse(MODELS, await self._http.get(routes.MODELS, timeout_s), routes.MODELS)["data"]
        if not models:
            raise InstanceError(f"instance {self.url} serves no model: its {routes.MODELS} is empty")
        return models[0]

    async def weight_version(self, timeout_s: float = CONTROL_TIMEOUT_S) -> WeightVersion:
        """The version it last received, as it reports; after a start, one that is not of this run."""
        version, _ = await self._held_version(timeout_s)
        return version

    async def world_size(self, timeout_s: float = CONTROL_TIMEOUT_S) -> int:
        """How many workers of the instance join the weight group."""
        path = routes.GET_WORLD_SIZE
        return self._http.parse(WORLD_SIZE, await self._http.get(path, timeout_s), path)["world_size"]

    async def sleep(self, timeout_s: float) -> None:
        """Aborts what is running and gives up the device's memory: keys, values and weights; twice does no harm."""
        await self._http.post(f"{routes.SLEEP}?level=2&mode=abort", None, within(timeout_s))

    async def is_sleeping(self, timeout_s: float) -> bool:
        """Whether it sleeps or is paused, which servers do not tell apart; False where it can do neither."""
        return await self._http.is_sleeping(timeout_s)

    async def wake_up(self, tag: Literal["weights", "kv_cache"], timeout_s: float) -> None:
        """As the call of a weight update."""
        await self._http.post(update_calls.wake_up(tag).path, None, within(timeout_s))

    async def init_weight_transfer(self, info: inference.InitInfo, timeout_s: float) -> None:
        """Returns when every member of the weight group has joined."""
        await self._http.post(routes.INIT_WEIGHT_TRANSFER, inference.InitRequest(init_info=info), within(timeout_s))

    async def in_order(self, calls: Sequence[Call], timeout_s: float | None) -> tuple[list[Answer], str | None]:
        """The answers of `calls`, up to the first that does not allow the next, and the boot id in the response that
        has the last, if any; see `InstanceHttp.in_order`. Without a timeout another one has to bound them."""
        timeout = UNBOUNDED if timeout_s is None else within(timeout_s)
        answers, headers = await self._http.in_order(calls, timeout)
        return answers, self._http.boot_id(headers)

    def require(self, call: Call, answer: Answer) -> None:
        """Raises for a call that was refused what it would have raised alone."""
        self._http.require(call, answer)

    async def base_digest(self, names: Sequence[str], timeout_s: float) -> str:
        """Of the weights that adapters are put beside, `names` (`async_rl.shared.weights.fingerprint.base_digest`);
        "None" where these are not complete."""
        return _agreed(await self._call_workers(routes.BASE_METHOD, list(names), timeout_s))

    async def load_adapter(self, version: WeightVersion, timeout_s: float) -> None:
        """Has it load the adapters that it received last, and forget others: nothing samples from these any more.

        Raises:
            InstanceError: it has not received any, or does not load them.
        """
        # All workers load what the first one has saved.
        directory, *_ = await self._call_workers(routes.ADAPTER_METHOD, [], timeout_s)
        body = LoadAdapterRequest(lora_name=version, lora_path=directory)
        await self._http.post(routes.LOAD_ADAPTER, body, within(timeout_s))
        models = self._http.parse(MODELS, await self._http.get(routes.MODELS, timeout_s), routes.MODELS)["data"]
        for name in (model["id"] for model in models if model.get("parent") and model["id"] != version):
            await self._http.post(routes.UNLOAD_ADAPTER, UnloadAdapterRequest(lora_name=name), within(timeout_s))
        self._adapter = version

    async def nccl_versions(self, timeout_s: float) -> list[str]:
        """NCCL and torch of each worker; empty if its server has no such method, which older ones have not."""
        return await self._call_workers_that_can(routes.NCCL_METHOD, timeout_s)

    async def engine_options(self, timeout_s: float) -> str:
        """The engine's start options that decide how it loads weights, if its workers report them, and their number."""
        if self.dialect.holds_what_it_received:
            return "1 worker"
        if not (options := await self._call_workers_that_can(routes.OPTIONS_METHOD, timeout_s)):
            return f"{await self.world_size(timeout_s)} workers"
        return f"{len(options)} workers of {', '.join(sorted(set(options)))}"

    async def _call_workers_that_can(self, method: str, timeout_s: float) -> list[str]:
        """Empty if its server refuses the method; not if it refuses this trainer, since another one has it."""
        try:
            return await self._call_workers(method, [], timeout_s)
        except InstanceRefused as error:
            if error.status == HTTPStatus.CONFLICT:
                raise
            return []

    async def _call_workers(self, method: str, args: list[str], timeout_s: float) -> list[str]:
        """One result per worker of the instance."""
        return (await self._ask_workers(method, args, timeout_s))[0]

    async def _ask_workers(self, method: str, args: list[str], timeout_s: float) -> tuple[list[str], Mapping[str, str]]:
        body = inference.RpcRequest(method=method, args=args, timeout=timeout_s)
        answer, headers = await self._http.exchange("POST", routes.COLLECTIVE_RPC, body, within(timeout_s))
        return [str(result) for result in self._http.parse(RPC, answer, routes.COLLECTIVE_RPC).results], headers

    async def _require_holding(self, answer: ResponseStream) -> None:
        """Raises StaleWeights unless the process in service holds the requested version."""
        held = await self.holding()
        answer.came_from(held.boot_id)
        if held.version != answer.version:
            raise StaleWeights(
                f"instance {self.url} holds weight version {held.version!r}, asked for {answer.version!r}: "
                "it needs the weights of the next publish"
            )


def _agreed(results: Sequence[str]) -> str:
    """The result of all workers; each of them once if they differ."""
    return ", ".join(sorted(set(results)))
