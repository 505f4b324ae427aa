"""Bodies of an instance's routes as the trainer sends and reads them; for `async_rl.instance.client`."""

from typing import Annotated, NotRequired

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from async_rl.protocol import inference
from async_rl.protocol.inference import SamplingParams


class Model(TypedDict):
    id: str
    max_model_len: int
    owned_by: NotRequired[str | None]


class Version(TypedDict):
    version: str


class Models(TypedDict):
    data: Annotated[list[Model], Field(fail_fast=True)]


class WeightInfo(TypedDict):
    weight_version: str


class WorldSize(TypedDict):
    world_size: int


VERSION = TypeAdapter(Version)
MODELS = TypeAdapter(Models)
WEIGHT_INFO = TypeAdapter(WeightInfo)
WORLD_SIZE = TypeAdapter(WorldSize)
RPC = TypeAdapter(inference.RpcResponse)


class CompletionRequest(SamplingParams):
    """POST /v1/completions with token ids; the sampling fields are on the same level as the prompt."""

    prompt: list[int]
    request_id: str
    return_token_ids: bool = True
    stream: bool = True


def generate_request(prompt: list[int], params: SamplingParams, request_id: str) -> inference.GenerateRequest:
    return inference.GenerateRequest(token_ids=prompt, sampling_params=params, request_id=request_id, stream=True)


def completion_request(prompt: list[int], params: SamplingParams, request_id: str) -> CompletionRequest:
    # Servers without the generate route do not know these.
    fields = params.model_dump(exclude={"stream_interval", "num_continued"})
    return CompletionRequest(prompt=prompt, request_id=request_id, **fields)
