"""Request and response bodies of an inference instance: the part of vLLM's RL HTTP protocol (0.32) a trainer needs.

Both ends import this module: `instance/client.py` sends these, `inference_service` responds to them, and a stock
`vllm serve` with its RL routes enabled understands them too. Unknown fields in responses are ignored, so a newer
server can add some.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from async_rl.config.texts import matching
from async_rl.shared.protocol.body import Body, StrictBody, Text

TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]
"""Lists are checked up to their first error: millions of them would take gigabytes to describe."""


MAX_WORKERS = 4096
"""Of one instance."""


class SamplingParams(Body):
    """How to sample; the fields, names and defaults of vLLM. Child j of `n` uses `seed + j`.

    `logprobs`: None for none, 0 for the sampled token's own, k for the top k as well. `top_k` 0 or -1 means off.
    `stop`: texts that end a response, with the token that completes the first of them.
    `stream_interval`: the number of tokens of a response in each chunk of a streaming response.
    `num_continued`: how many of the prompt's last tokens are the beginning of the response, in a request that continues
    one; the embedded engine's only.
    `is_turn`: whether a later request may begin with this prompt and its response, whose keys and values are kept then;
    the embedded engine's only.
    `routed_experts`: whether a choice says at its end which experts its tokens were sent to; the embedded engine's
    only, vLLM has an option of the server.
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
    stop_token_ids: list[int] = Field(default_factory=list, fail_fast=True)
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list, max_length=256, fail_fast=True)
    ignore_eos: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    stream_interval: int | None = Field(None, ge=1)
    num_continued: int | None = Field(None, ge=1)
    is_turn: bool | None = None
    routed_experts: bool | None = None


class GenerateRequest(Body):
    """POST /inference/v1/generate: token ids in, token ids out."""

    token_ids: TokenIds
    sampling_params: SamplingParams
    model: str | None = None
    request_id: Text | None = None
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
    """`finish_reason`: stop, length, abort or error; an aborted choice comes with HTTP 200 and is no sample.

    `routed_experts`: see `routed_experts.py`; in the last chunk of a streaming response.
    """

    index: int
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    logprobs: ChoiceLogprobs | None = None
    weight_versions: list[VersionSpan] | None = None
    routed_experts: str | None = None


class GenerateChunk(Body):
    """One `data:` event of a streaming response, which ends with `data: [DONE]`.

    `token_ids` and `logprobs` of a choice are the new ones; `finish_reason` is null until its last chunk.
    `weight_versions` covers the whole output of the choice so far. vLLM sends it with the last chunk only, the embedded
    engine with every chunk, so that a client detects lost and repeated chunks.
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


class InitInfo(StrictBody):
    """How a worker joins the trainer's weight group: worker rank = rank_offset + its rank in the instance.

    `secret` is of this instance in this group only; its workers must know it to connect to the store at the master
    address, and enter there as their own ranks. Where further pipeline stages of the trainer send their own weights,
    each has a weight group of its own with the same ranks and secrets, whose store is at the next of `stage_ports`.
    """

    master_address: str
    master_port: int = Field(ge=1, le=65535)
    secret: str = Field(min_length=32, max_length=1024, repr=False)
    rank_offset: int = Field(ge=1)
    world_size: int = Field(ge=2, le=2**20)
    backend: Literal["sockets", "nccl", "hccl", "cpu_ipc", "cuda_ipc", "npu_ipc"] = "sockets"
    bucket_bytes: int = Field(ge=1)
    timeout_s: float = Field(gt=0, le=86_400)
    stage_ports: list[Annotated[int, Field(ge=1, le=65535)]] = Field(default_factory=list, fail_fast=True)


class InitRequest(Body):
    init_info: InitInfo


class AdapterInfo(StrictBody):
    """What the factors A and B of a stream of adapters are to a model: y = W x + alpha / rank B A x (arXiv 2106.09685).

    `base` is the digest of the weights W below them (`async_rl.shared.weights.fingerprint.base_digest`).
    """

    rank: int = Field(ge=1)
    alpha: float = Field(gt=0, allow_inf_nan=False)
    base: Annotated[str, matching("[0-9a-f]{32}", "32 hexadecimal digits")]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class UpdateInfo(StrictBody):
    """The tensors that follow on the weight group, in this order; three lists of equal length.

    `names` are Hugging Face checkpoint names, `dtype_names` torch attribute names such as "float32". With `snapshot`,
    the path of a safetensors file, they are read from there, in the same order, and no weight group is needed. With
    `adapter` they are the factors of adapters, named as in peft's files, and the weights below them stay. With `stages`
    each tensor comes from the weight group of its stage, in this order within a stage.
    """

    names: list[str] = Field(min_length=1, fail_fast=True)
    dtype_names: list[str] = Field(fail_fast=True)
    shapes: list[Annotated[list[int], Field(fail_fast=True)]] = Field(fail_fast=True)
    snapshot: str | None = None
    adapter: AdapterInfo | None = None
    stages: list[Annotated[int, Field(ge=0)]] | None = Field(None, fail_fast=True)


class UpdateRequest(Body):
    update_info: UpdateInfo


class StartUpdateRequest(Body):
    is_checkpoint_format: bool = True


class FinishUpdateRequest(Body):
    weight_version: Text | None = None


class AbortRequest(Body):
    request_ids: Annotated[list[str], Field(fail_fast=True)] | None = None


class RpcRequest(Body):
    method: str
    args: list[str] = Field(default_factory=list, fail_fast=True)
    timeout: float | None = None


class RpcResponse(Body):
    """One result per worker of the instance."""

    results: list[Any]
