"""Request and response bodies and paths of the wire: the part of vLLM's RL HTTP protocol (0.32) that a trainer needs.

Both ends import this module: `async_rl.client` speaks it, `inference_service.app` serves it, and a stock `vllm serve`
with its RL routes on understands it too. Unknown fields in answers are ignored, so a newer server can say more.
"""

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
MODELS = "/v1/models"
HEALTH = "/health"
VERSION = "/version"
METRICS = "/metrics"
PAUSE = "/pause"
RESUME = "/resume"
IS_PAUSED = "/is_paused"
GET_WORLD_SIZE = "/get_world_size"
INIT_WEIGHT_TRANSFER = "/init_weight_transfer_engine"
START_WEIGHT_UPDATE = "/start_weight_update"
UPDATE_WEIGHTS = "/update_weights"
FINISH_WEIGHT_UPDATE = "/finish_weight_update"
WEIGHT_INFO = "/weight_info"
ABORT_REQUESTS = "/abort_requests"
COLLECTIVE_RPC = "/collective_rpc"

FINGERPRINT_METHOD = "weight_fingerprint"
"""Worker method behind `/collective_rpc` that answers with the fingerprint of the last received weight stream."""

OPTIONS_METHOD = "engine_options"
"""Worker method of vLLM's servers that says what of their start decides how weights are loaded, in words."""

NOTE_VERSION_METHOD = "note_weight_version"
"""Worker method of servers that keep no weight version themselves (vLLM 0.23): keeps the one given as only argument."""

NOTED_VERSION_METHOD = "noted_weight_version"
"""Worker method that answers with the version noted last; "default" in a fresh worker."""

FLEET = "/fleet"
FLEET_REGISTER = "/fleet/register"
FLEET_ADD = "/fleet/add"
FLEET_DRAIN = "/fleet/drain"
FLEET_REMOVE = "/fleet/remove"
FLEET_SYNC = "/fleet/sync"
"""The trainer's own routes, see `async_rl.fleet`: GET /fleet lists the instances, the others change the fleet."""

BOOT_ID_HEADER = "X-Async-RL-Boot-Id"
"""Of every answer of the embedded engine's server and of a vLLM that our launcher started: names the process, new with
each start. Of another vLLM, `process_start_time_seconds` of its /metrics does."""

MAX_CONCURRENCY_HEADER = "X-Async-RL-Max-Concurrency"
"""Beside it: how many responses the engine generates at once."""

OWNED_BY_EMBEDDED = "async-rl"
"""`owned_by` of the embedded engine's model card; vLLM's is "vllm"."""

PROTOCOL_VERSION = "0.32.0"
"""The dialect the embedded engine speaks; its `/version` answers so, and a client chooses its dialect by it."""

TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


def _require_splittable(url: str) -> str:
    """Raises ValueError for a port out of range and for brackets without an IPv6 address in them."""
    _ = urlsplit(url).port
    return url


_HOST = r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*)"
BaseUrl = Annotated[
    str, Field(pattern=rf"^https?://{_HOST}(:[1-9]\d{{0,4}})?$", max_length=2048), AfterValidator(_require_splittable)
]
"""An instance's address as others reach it: http://host:port, and nothing after it."""


class Body(BaseModel):
    """A body on the wire; fields this side does not know are ignored, as vLLM does."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class SamplingParams(Body):
    """How to sample; the fields, names and defaults of vLLM. Child j of `n` uses `seed + j`.

    `logprobs`: None for none, 0 for the sampled token's own, k for the top k as well. `top_k` 0 or -1 means off.
    `stream_interval`: a streaming answer has a chunk for every so many tokens of a response.
    """

    n: int = Field(1, ge=1, le=1024)
    max_tokens: int = Field(16, ge=1)
    min_tokens: int = Field(0, ge=0)
    temperature: float = Field(1.0, ge=0.0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(1.0, gt=0.0, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    stream_interval: int | None = Field(None, ge=1)


class GenerateRequest(Body):
    """POST /inference/v1/generate: token ids in, token ids out."""

    token_ids: TokenIds
    sampling_params: SamplingParams
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = False


class TokenLogprob(Body):
    token_id: int
    logprob: float
    rank: int | None = None


class TokenLogprobContent(TokenLogprob):
    top_logprobs: list[TokenLogprob] = Field(default_factory=list)


class ChoiceLogprobs(Body):
    content: list[TokenLogprobContent] | None = None


class VersionSpan(Body):
    version: str
    start: int
    end: int


class GenerateChoice(Body):
    """`finish_reason`: stop, length, abort or error; an aborted choice comes with HTTP 200 and is no sample."""

    index: int
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    logprobs: ChoiceLogprobs | None = None
    weight_versions: list[VersionSpan] | None = None


class GenerateChunk(Body):
    """One `data:` event of a streaming answer, which ends with `data: [DONE]`.

    `token_ids` and `logprobs` of a choice are what is new; `finish_reason` is null until its last chunk.
    `weight_versions` covers the whole output of the choice so far. vLLM sends it with the last chunk only, the embedded
    engine with every chunk, so that a client notices a chunk that was lost or came twice.
    """

    request_id: str
    choices: list[GenerateChoice]


class Usage(Body):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class GenerateResponse(Body):
    request_id: str
    model: str | None = None
    created: int | None = None
    usage: Usage | None = None
    output_mode: Literal["tokens"] = "tokens"
    choices: list[GenerateChoice]


class InitInfo(Body):
    """How a worker joins the trainer's weight group: worker rank = rank_offset + its rank in the instance.

    `secret` is of this group alone; only who knows it can enter the store at the master address.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    master_address: str
    master_port: int = Field(ge=1, le=65535)
    secret: str = Field(min_length=32, max_length=1024, repr=False)
    rank_offset: int = Field(ge=1)
    world_size: int = Field(ge=2)
    backend: Literal["gloo", "nccl", "hccl"] = "gloo"
    bucket_bytes: int = Field(ge=1)
    timeout_s: float = Field(gt=0, le=86_400)


class InitRequest(Body):
    init_info: InitInfo


class UpdateInfo(Body):
    """The tensors that follow on the weight group, in this order; three lists of equal length.

    `names` are Hugging Face checkpoint names, `dtype_names` torch attribute names such as "float32". With `snapshot`,
    the path of a safetensors file, they are read from there, in the same order, and no weight group is needed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    names: list[str] = Field(min_length=1)
    dtype_names: list[str]
    shapes: list[list[int]]
    snapshot: str | None = None


class UpdateRequest(Body):
    update_info: UpdateInfo


class StartUpdateRequest(Body):
    is_checkpoint_format: bool = True


class FinishUpdateRequest(Body):
    weight_version: str | None = None


class AbortRequest(Body):
    request_ids: list[str] | None = None


class RpcRequest(Body):
    method: str
    args: list[str] = Field(default_factory=list)
    timeout: float | None = None


class RpcResponse(Body):
    """One result per worker of the instance."""

    results: list[Any]


InstanceState = Literal["joining", "ready", "draining", "stale", "dead"]
"""joining: known, without weights of this run yet; ready: serves the version in training; draining: finishes what it
has, takes nothing new; stale: answers, but holds other weights until the next publish; dead: does not answer."""


class InstanceInfo(Body):
    """What the fleet knows of one instance. `reason` says why it is not ready; while it is, `boot_id` names the process
    that was put in service with `version`."""

    name: str
    url: str
    state: InstanceState
    reason: str | None = None
    version: str | None = None
    boot_id: str | None = None
    outstanding_tokens: int = 0
    num_requests: int = 0
    tokens_per_s: float = 0.0
    num_tokens: int = 0
    num_failures: int = 0


class FleetInfo(Body):
    """GET /fleet."""

    version: str | None = None
    instances: list[InstanceInfo]
    desired_instances: int | None = None


class FleetBody(Body):
    """Bodies that change the fleet: a misspelt key must not pass for a default."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RegisterRequest(FleetBody):
    """POST /fleet/register, again and again: the instance at `url` is there. `boot_id` is new with each start of it."""

    url: BaseUrl
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    boot_id: str = Field(pattern=r"^[A-Za-z0-9-]{1,64}$")


class RegisterResponse(Body):
    """`leave`: the instance was drained or removed, and may end. `interval_s`: when to register again."""

    state: InstanceState | None
    leave: bool
    interval_s: float


class AddRequest(FleetBody):
    """POST /fleet/add: an instance that does not register itself; its name is its host and port unless given."""

    url: BaseUrl
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_.-]{1,128}$")


class NameRequest(FleetBody):
    """POST /fleet/drain and /fleet/remove: by name, or by URL."""

    name: str = Field(min_length=1, max_length=2048)


class SyncRequest(FleetBody):
    """POST /fleet/sync: what another leader of the same run has under way at each instance, by URL, in tokens."""

    leader: int = Field(ge=1)
    outstanding_tokens: dict[str, Annotated[int, Field(ge=0, le=2**53)]]


NEEDS_WEIGHTS = "weights"
"""`param` of a 503 of /health: the instance holds half an update, and serves again after a whole one."""


class ErrorInfo(Body):
    message: str
    type: str
    param: str | None = None
    code: int


class ErrorResponse(Body):
    """Body of every 4xx / 5xx answer, as vLLM's."""

    error: ErrorInfo
