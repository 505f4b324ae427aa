"""One inference instance over HTTP: the trainer's side of `async_rl.protocol`.

Every method runs on one event loop, and ends within its timeout in a result or an
`InstanceError` that names the instance. No method retries: that is the pool's and the publisher's business.
"""

import asyncio
import logging
import resource
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn, NotRequired, TypeVar

import aiohttp
from pydantic import BaseModel, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from async_rl import protocol
from async_rl.answer_stream import Answer, event_payloads
from async_rl.dialect import VLLM, Dialect, dialect_of
from async_rl.errors import InstanceError, InstanceRefused, InstanceTooSlow, InstanceUnreachable, StaleWeights
from async_rl.fleet.drafts import Draft, request_of
from async_rl.protocol import SamplingParams
from async_rl.types import WeightVersion

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
CONTROL_TIMEOUT_S = 10.0

KEEPALIVE_S = 2.0
"""Idle connections are dropped before the server drops them (uvicorn: 5 s): a POST must not meet a closing socket."""

OTHER_FILES = 256
"""Open files left to the rest of the process; each connection takes one. Requests beyond wait for a free connection."""

MAX_ERROR_CHARS = 500

Body = TypeVar("Body")


class _Model(TypedDict):
    id: str
    max_model_len: int
    owned_by: NotRequired[str | None]


class _Version(TypedDict):
    version: str


class _Models(TypedDict):
    data: list[_Model]


class _WeightInfo(TypedDict):
    weight_version: str


class _WorldSize(TypedDict):
    world_size: int


_VERSION = TypeAdapter(_Version)
_MODELS = TypeAdapter(_Models)
_WEIGHT_INFO = TypeAdapter(_WeightInfo)
_WORLD_SIZE = TypeAdapter(_WorldSize)
_UNBOUNDED = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
_RPC = TypeAdapter(protocol.RpcResponse)


class Connections:
    """The connections to all instances: one `aiohttp.ClientSession`, opened by the first call on the event loop."""

    def __init__(self, token: str | None = None) -> None:
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._session: aiohttp.ClientSession | None = None

    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=_most_connections(), keepalive_timeout=KEEPALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class InstanceClient:
    """Speaks to the instance at `url`; `request_timeout_s` bounds one generation, whose tokens come in chunks of
    `stream_interval`."""

    def __init__(self, connections: Connections, url: str, request_timeout_s: float, stream_interval: int) -> None:
        self.url = url.rstrip("/")
        self.dialect: Dialect = VLLM
        """What `learn_dialect` found; before that, that of a server about which nothing is known."""
        self.streams = True
        """Whether it answers generate requests token by token, as far as seen."""
        self._connections = connections
        self._request_timeout_s = request_timeout_s
        self._stream_interval = stream_interval
        self._heard_s = 0.0
        """`time.monotonic()` of the last tokens of any request."""

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        version: WeightVersion,
        drafts: Sequence[Draft],
    ) -> None:
        """Brings the drafts to their ends, all of weight version `version`; what arrives stays, also if it fails.

        Uses the generate route, whose answer proves the version of each token. Where the server lacks it, completions
        with token ids, and the version is read before and after.

        Args:
            drafts: of one prompt; see `request_of`.

        Raises:
            InstanceUnreachable, InstanceRefused: see errors.py.
            InstanceTooSlow: it did not finish in time, but it does make tokens, for this request or for others.
            StaleWeights: some token was sampled from other weights; it is not in the drafts.
            InstanceError: the answer is incomplete or malformed, or the request was aborted.
        """
        began_s = time.monotonic()
        answer = Answer(self.url, drafts, version, says_versions=self.dialect.has_generate)
        try:
            async with asyncio.timeout(self._request_timeout_s):
                await self._ask(prompt_token_ids, sampling, request_id, version, drafts, answer)
        except TimeoutError as error:
            slow = f"instance {self.url} did not finish a request within {self._request_timeout_s:g} s"
            if self._heard_s > began_s:
                # It may still wait in the instance's own queue, behind others that go on.
                raise InstanceTooSlow(f"{slow}, of which {answer.num_tokens} tokens came") from error
            raise InstanceUnreachable(f"{slow}, and not one token came, of this or another one") from error
        except StaleWeights:
            answer.take_back_unproven()
            raise
        finally:
            answer.vouch()

    async def _ask(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        version: WeightVersion,
        drafts: Sequence[Draft],
        answer: Answer,
    ) -> None:
        prompt, params = request_of(
            prompt_token_ids, sampling, drafts, noise_by_position=self.dialect.noise_by_position
        )
        params = params.model_copy(update={"stream_interval": self._stream_interval})
        if self.dialect.has_generate:
            try:
                await self._read(protocol.GENERATE, _generate_request(prompt, params, request_id), answer)
            except _RouteMissing as error:
                logger.info("%s; using %s", error, protocol.COMPLETIONS)
                self.dialect = replace(self.dialect, has_generate=False)
        if not self.dialect.has_generate:
            answer.says_versions = False
            await self._require_version(version)
            await self._read(protocol.COMPLETIONS, _completion_request(prompt, params, request_id), answer)
            await self._require_version(version)
        answer.require_complete()

    async def _read(self, path: str, body: BaseModel, answer: Answer) -> None:
        """POSTs a request and feeds `answer` with what comes, in events or at once."""
        try:
            session = self._connections.session()
            data = body.model_dump_json(exclude_none=True).encode()
            async with session.post(self.url + path, data=data, timeout=_UNBOUNDED) as response:
                if response.status != 200:
                    refusal = await response.read()
                    response.close()
                    self._refuse("POST", path, response.status, refusal)
                self.streams = response.content_type == "text/event-stream"
                if self.streams:
                    async for payload in event_payloads(response.content):
                        answer.feed(payload)
                        self._heard_s = time.monotonic()
                else:
                    answer.feed(await response.read())
                    self._heard_s = time.monotonic()
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable("POST", path, error) from error

    async def learn_dialect(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Asks the server what it is; again after it may have been replaced by another one."""
        version = self._parse(_VERSION, await self._get(protocol.VERSION, timeout_s), protocol.VERSION)["version"]
        self.dialect = dialect_of(version, (await self._model(timeout_s)).get("owned_by"))

    async def health(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Returns if the instance is healthy; InstanceRefused with status 503 if it runs but cannot serve."""
        await self._get(protocol.HEALTH, timeout_s)

    async def max_model_len(self, timeout_s: float = CONTROL_TIMEOUT_S) -> int:
        """Prompt plus response tokens that the served model takes at most."""
        return (await self._model(timeout_s))["max_model_len"]

    async def _model(self, timeout_s: float) -> _Model:
        models = self._parse(_MODELS, await self._get(protocol.MODELS, timeout_s), protocol.MODELS)["data"]
        if not models:
            raise InstanceError(f"instance {self.url} serves no model: its {protocol.MODELS} is empty")
        return models[0]

    async def weight_version(self, timeout_s: float = CONTROL_TIMEOUT_S) -> WeightVersion:
        """What it was last given, as it says itself; after a start that is no version of ours."""
        if not self.dialect.keeps_version:
            noted = set(await self._call_workers(protocol.NOTED_VERSION_METHOD, [], timeout_s))
            return ", ".join(sorted(noted))
        answer = await self._get(protocol.WEIGHT_INFO, timeout_s)
        return self._parse(_WEIGHT_INFO, answer, protocol.WEIGHT_INFO)["weight_version"]

    async def world_size(self, timeout_s: float = CONTROL_TIMEOUT_S) -> int:
        """How many workers of the instance join the weight group."""
        answer = await self._get(protocol.GET_WORLD_SIZE, timeout_s)
        return self._parse(_WORLD_SIZE, answer, protocol.GET_WORLD_SIZE)["world_size"]

    async def pause(self, timeout_s: float) -> None:
        """Lets running requests finish, holds new ones back and empties the KV and prefix caches."""
        await self._post(f"{protocol.PAUSE}?mode=wait&clear_cache=true", None, _total(timeout_s))

    async def resume(self, timeout_s: float) -> None:
        await self._post(protocol.RESUME, None, _total(timeout_s))

    async def init_weight_transfer(self, info: protocol.InitInfo, timeout_s: float) -> None:
        """Answers when every member of the weight group has joined."""
        await self._post(protocol.INIT_WEIGHT_TRANSFER, protocol.InitRequest(init_info=info), _total(timeout_s))

    async def start_weight_update(self, timeout_s: float) -> None:
        await self._post(protocol.START_WEIGHT_UPDATE, protocol.StartUpdateRequest(), _total(timeout_s))

    async def update_weights(self, info: protocol.UpdateInfo) -> None:
        """Answers when all tensors have been received over the weight group; the caller, who sends them, bounds it."""
        await self._post(protocol.UPDATE_WEIGHTS, protocol.UpdateRequest(update_info=info), _UNBOUNDED)

    async def finish_weight_update(self, version: WeightVersion, timeout_s: float) -> None:
        if not self.dialect.keeps_version:
            await self._post(protocol.FINISH_WEIGHT_UPDATE, None, _total(timeout_s))
            await self._call_workers(protocol.NOTE_VERSION_METHOD, [version], timeout_s)
            return
        body = protocol.FinishUpdateRequest(weight_version=version)
        await self._post(protocol.FINISH_WEIGHT_UPDATE, body, _total(timeout_s))

    async def weight_fingerprints(self, timeout_s: float) -> list[str]:
        """What each worker of the instance received last; see `async_rl.weight_stream.Fingerprint`."""
        return await self._call_workers(protocol.FINGERPRINT_METHOD, [], timeout_s)

    async def _call_workers(self, method: str, args: list[str], timeout_s: float) -> list[str]:
        """One answer per worker of the instance."""
        body = protocol.RpcRequest(method=method, args=args, timeout=timeout_s)
        answer = await self._post(protocol.COLLECTIVE_RPC, body, _total(timeout_s))
        return [str(result) for result in self._parse(_RPC, answer, protocol.COLLECTIVE_RPC).results]

    async def _require_version(self, version: WeightVersion) -> None:
        if (actual := await self.weight_version()) != version:
            raise StaleWeights(
                f"instance {self.url} holds weight version {actual!r}, asked for {version!r}: "
                "it needs the weights of the next publish"
            )

    async def _get(self, path: str, timeout_s: float) -> bytes:
        return await self._call("GET", path, None, _total(timeout_s))

    async def _post(self, path: str, body: BaseModel | None, timeout: aiohttp.ClientTimeout) -> bytes:
        return await self._call("POST", path, body.model_dump_json().encode() if body else None, timeout)

    async def _call(self, method: str, path: str, body: bytes | None, timeout: aiohttp.ClientTimeout) -> bytes:
        try:
            session = self._connections.session()
            async with session.request(method, self.url + path, data=body, timeout=timeout) as response:
                answer = await response.read()
                if response.status >= 500:
                    # vLLM ends the connection after such an answer without saying so: it must not be used again.
                    response.close()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(method, path, error) from error
        if response.status != 200:
            self._refuse(method, path, response.status, answer)
        return answer

    def _unreachable(self, method: str, path: str, error: Exception) -> InstanceUnreachable:
        why = str(error) or type(error).__name__
        return InstanceUnreachable(f"instance {self.url} did not answer {method} {path}: {why}")

    def _refuse(self, method: str, path: str, status: int, answer: bytes) -> NoReturn:
        reason = _reason(answer)
        # 403: the route is switched off. 404 without an error body: there is no such route (an unknown model has one).
        missing = status == 403 or (status == 404 and reason is None)
        raise (_RouteMissing if missing else InstanceRefused)(
            f"instance {self.url} refused {method} {path} with {status}: "
            + (reason or answer[:MAX_ERROR_CHARS].decode(errors="replace") or "(empty body)"),
            status,
        )

    def _parse(self, adapter: TypeAdapter[Body], answer: bytes, path: str) -> Body:
        try:
            return adapter.validate_json(answer)
        except ValidationError as error:
            raise InstanceError(
                f"instance {self.url} answered {path} with a body of another protocol: {error}"
            ) from error


class _RouteMissing(InstanceRefused):
    """The server does not serve this path at all."""


class _CompletionRequest(SamplingParams):
    """POST /v1/completions with token ids; the sampling fields stand beside the prompt."""

    prompt: list[int]
    request_id: str
    return_token_ids: bool = True
    stream: bool = True


def _generate_request(prompt: list[int], params: SamplingParams, request_id: str) -> protocol.GenerateRequest:
    return protocol.GenerateRequest(token_ids=prompt, sampling_params=params, request_id=request_id, stream=True)


def _completion_request(prompt: list[int], params: SamplingParams, request_id: str) -> _CompletionRequest:
    # Servers without the generate route do not know the interval.
    fields = params.model_dump(exclude={"stream_interval"})
    return _CompletionRequest(prompt=prompt, request_id=request_id, **fields)


def _most_connections() -> int:
    """As many as the process may open files, which this raises as far as the system lets it, less some for others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(1, hard - OTHER_FILES) if hard != resource.RLIM_INFINITY else 0


def _reason(answer: bytes) -> str | None:
    """The message of an error body, or None where the body is not the protocol's."""
    try:
        return protocol.ErrorResponse.model_validate_json(answer).error.message
    except ValidationError:
        return None


def _total(timeout_s: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(CONNECT_TIMEOUT_S, timeout_s))
