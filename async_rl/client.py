"""One inference instance over HTTP: the trainer's side of `async_rl.protocol`.

Every method runs on one event loop, and ends within its timeout in a result or an
`InstanceError` that names the instance. No method retries: that is the pool's and the publisher's business.
"""

import logging
from collections.abc import Sequence, Set
from typing import NoReturn, TypeVar

import aiohttp
from pydantic import BaseModel, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from async_rl import protocol
from async_rl.errors import InstanceError, InstanceRefused, InstanceUnreachable, StaleWeights
from async_rl.protocol import SamplingParams
from async_rl.types import UNPROVEN, Response, WeightSpan, WeightVersion

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
CONTROL_TIMEOUT_S = 10.0

KEEPALIVE_S = 2.0
"""Idle connections are dropped before the server drops them (uvicorn: 5 s): a POST must not meet a closing socket."""

MAX_CONNECTIONS = 512
"""Requests beyond it wait for a free connection: one process may commonly open only 1024 files."""

MAX_ERROR_CHARS = 500

Body = TypeVar("Body")


# The fields that this side reads of the large answers, as plain dicts: a third of the time that models take.
class _Token(TypedDict):
    logprob: float


class _Content(TypedDict):
    content: list[_Token] | None


class _Span(TypedDict):
    version: str
    start: int
    end: int


class _Choice(TypedDict):
    index: int
    finish_reason: str | None
    token_ids: list[int] | None
    logprobs: _Content | None
    weight_versions: list[_Span] | None


class _Generated(TypedDict):
    choices: list[_Choice]


class _CompletionLogprobs(TypedDict):
    token_logprobs: list[float]


class _CompletionChoice(TypedDict):
    index: int
    finish_reason: str | None
    token_ids: list[int] | None
    logprobs: _CompletionLogprobs | None


class _Completed(TypedDict):
    choices: list[_CompletionChoice]


class _Model(TypedDict):
    id: str
    max_model_len: int


class _Models(TypedDict):
    data: list[_Model]


class _WeightInfo(TypedDict):
    weight_version: str


class _WorldSize(TypedDict):
    world_size: int


_GENERATED = TypeAdapter(_Generated)
_COMPLETED = TypeAdapter(_Completed)
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
            connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=KEEPALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class InstanceClient:
    """Speaks to the instance at `url`; `request_timeout_s` bounds one generation."""

    def __init__(self, connections: Connections, url: str, request_timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._connections = connections
        # A request may wait long for a free connection behind others; its own time counts from sending.
        self._generate_timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=request_timeout_s
        )
        self._has_generate = True

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, request_id: str, version: WeightVersion
    ) -> list[Response]:
        """Samples `sampling.n` responses, all of weight version `version`, in child order; their `text` is empty.

        Uses the generate route, whose answer proves the version of each token. Where the server lacks it, completions
        with token ids, and the version is read before and after.

        Raises:
            InstanceUnreachable, InstanceRefused: see errors.py.
            StaleWeights: some token was sampled from other weights.
            InstanceError: the answer is incomplete or malformed, or the request was aborted.
        """
        if self._has_generate:
            request = protocol.GenerateRequest(
                token_ids=list(prompt_token_ids), sampling_params=sampling, request_id=request_id
            )
            try:
                answer = await self._post(protocol.GENERATE, request, self._generate_timeout)
            except _RouteMissing:
                self._has_generate = False
                logger.info("%s has no %s; using %s", self.url, protocol.GENERATE, protocol.COMPLETIONS)
            else:
                return self._responses(self._parse(_GENERATED, answer, protocol.GENERATE)["choices"], sampling, version)
        return await self._complete(prompt_token_ids, sampling, request_id, version)

    async def health(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Returns if the instance is healthy; InstanceRefused with status 503 if it runs but cannot serve."""
        await self._get(protocol.HEALTH, timeout_s)

    async def max_model_len(self, timeout_s: float = CONTROL_TIMEOUT_S) -> int:
        """Prompt plus response tokens that the served model takes at most."""
        models = self._parse(_MODELS, await self._get(protocol.MODELS, timeout_s), protocol.MODELS)["data"]
        if not models:
            raise InstanceError(f"instance {self.url} serves no model: its {protocol.MODELS} is empty")
        return models[0]["max_model_len"]

    async def weight_version(self, timeout_s: float = CONTROL_TIMEOUT_S) -> WeightVersion:
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
        body = protocol.FinishUpdateRequest(weight_version=version)
        await self._post(protocol.FINISH_WEIGHT_UPDATE, body, _total(timeout_s))

    async def weight_fingerprints(self, timeout_s: float) -> list[str]:
        """What each worker of the instance received last; see `async_rl.weight_stream.Fingerprint`."""
        body = protocol.RpcRequest(method=protocol.FINGERPRINT_METHOD, timeout=timeout_s)
        answer = await self._post(protocol.COLLECTIVE_RPC, body, _total(timeout_s))
        return [str(result) for result in self._parse(_RPC, answer, protocol.COLLECTIVE_RPC).results]

    async def _complete(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, request_id: str, version: WeightVersion
    ) -> list[Response]:
        await self._require_version(version)
        request = _CompletionRequest(prompt=list(prompt_token_ids), request_id=request_id, **sampling.model_dump())
        answer = await self._post(protocol.COMPLETIONS, request, self._generate_timeout)
        await self._require_version(version)
        choices: list[_Choice] = [
            {
                "index": choice["index"],
                "finish_reason": choice["finish_reason"],
                "token_ids": choice["token_ids"],
                "logprobs": choice["logprobs"]
                and {"content": [{"logprob": logprob} for logprob in choice["logprobs"]["token_logprobs"]]},
                "weight_versions": [{"version": version, "start": 0, "end": len(choice["token_ids"] or ())}],
            }
            for choice in self._parse(_COMPLETED, answer, protocol.COMPLETIONS)["choices"]
        ]
        return self._responses(choices, sampling, version)

    async def _require_version(self, version: WeightVersion) -> None:
        if (actual := await self.weight_version()) != version:
            self._stale({actual}, version)

    def _responses(self, choices: list[_Choice], sampling: SamplingParams, version: WeightVersion) -> list[Response]:
        choices.sort(key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != list(range(sampling.n)):
            raise InstanceError(
                f"instance {self.url} answered {len(choices)} choices with indexes {[c['index'] for c in choices]}, "
                f"expected {sampling.n}"
            )
        return [self._response(choice, version) for choice in choices]

    def _response(self, choice: _Choice, version: WeightVersion) -> Response:
        where = f"instance {self.url}, choice {choice['index']}"
        if choice["finish_reason"] not in ("stop", "length"):
            raise InstanceError(
                f"{where}: finish_reason is {choice['finish_reason']!r}, expected 'stop' or 'length': no whole sample"
            )
        token_ids = tuple(choice["token_ids"] or ())
        logprobs = tuple(token["logprob"] for token in (choice["logprobs"] or {"content": None})["content"] or ())
        if not token_ids or len(token_ids) != len(logprobs):
            raise InstanceError(
                f"{where}: {len(token_ids)} tokens with {len(logprobs)} log-probs, expected one for each"
            )
        spans = tuple(WeightSpan(**span) for span in choice["weight_versions"] or ())
        response = Response(token_ids, logprobs, "", choice["finish_reason"] or "", spans, self.url)
        if UNPROVEN in response.weight_versions:
            raise InstanceError(
                f"{where}: weight_versions {spans} do not cover its {len(token_ids)} tokens: the server must be one "
                "that reports them"
            )
        if others := response.weight_versions - {version}:
            self._stale(others, version)
        return response

    def _stale(self, actual: Set[str], expected: WeightVersion) -> NoReturn:
        raise StaleWeights(
            f"instance {self.url} sampled from weight version {', '.join(sorted(actual))!r}, asked for {expected!r}: "
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
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = str(error) or type(error).__name__
            raise InstanceUnreachable(f"instance {self.url} did not answer {method} {path}: {why}") from error
        if response.status == 200:
            return answer
        reason = _reason(answer)
        # 403: the route is switched off. 404 without an error body: there is no such route (an unknown model has one).
        missing = response.status == 403 or (response.status == 404 and reason is None)
        raise (_RouteMissing if missing else InstanceRefused)(
            f"instance {self.url} refused {method} {path} with {response.status}: "
            + (reason or answer[:MAX_ERROR_CHARS].decode(errors="replace") or "(empty body)"),
            response.status,
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


def _reason(answer: bytes) -> str | None:
    """The message of an error body, or None where the body is not the protocol's."""
    try:
        return protocol.ErrorResponse.model_validate_json(answer).error.message
    except ValidationError:
        return None


def _total(timeout_s: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(CONNECT_TIMEOUT_S, timeout_s))
