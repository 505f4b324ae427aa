"""Differences between the servers that implement the protocol, and the bodies of their routes as the trainer sends and
reads them; for `async_rl.rollouts.instance.client`.

`GET /version` distinguishes vLLM's releases; the embedded engine reports the release whose dialect it implements, and
is recognised by the owner of its model card.
"""

import re
from dataclasses import dataclass
from typing import Annotated, NotRequired

from pydantic import BaseModel, Field, TypeAdapter
from typing_extensions import TypedDict

from async_rl.shared.protocol import inference, routes
from async_rl.shared.protocol.inference import SamplingParams
from async_rl.shared.protocol.sequence import SequenceResponse


@dataclass(frozen=True, slots=True)
class Dialect:
    """How to call one server.

    `has_generate`: serves /inference/v1/generate with all n choices and their weight versions; otherwise completions.
    `keeps_version`: has the /weight_info route; otherwise its workers store the version for us.
    `noise_by_position`: the noise of a token is a function of (seed, index in prompt plus response), so a response
    continued under the same seed gets exactly the tokens it would have got. Other servers are sent no seeds: vLLM
    samples row by row with seeds, its results depend on the batch all the same, and 0.32 on CPU crashes with them when
    a prompt is computed in several parts.
    `holds_what_it_received`: its fingerprint is computed from the memory it computes with. In other servers a loader is
    in between, and only log-probs show how it loaded the tensors. Such a server also loads adapters by itself, each
    under a name of its own, and keeps the weights below them that it began with.
    """

    name: str
    has_generate: bool
    keeps_version: bool
    noise_by_position: bool
    holds_what_it_received: bool


EMBEDDED = Dialect("embedded", True, True, True, True)
VLLM = Dialect("vllm", True, True, False, False)
"""vLLM since the release that keeps weight versions."""
VLLM_WITHOUT_VERSIONS = Dialect("vllm without weight versions", False, False, False, False)
"""vLLM 0.23, which vllm-ascend 0.23 builds on."""

DEAD_ENGINE = "EngineCore encountered an issue"
"""The start of vLLM's message after its engine process died, which its server outlives for a while."""

FIRST_WITH_VERSIONS = (0, 32)
"""The oldest release in which weight versions were found; releases between 0.23 and it were not examined."""


def dialect_of(version: str, owned_by: str | None) -> Dialect:
    """The dialect of a server with this `/version` and owner of the first model card; unknown versions count as new."""
    if owned_by == routes.OWNED_BY_EMBEDDED:
        return EMBEDDED
    numbers = re.match(r"(\d+)\.(\d+)", version)
    old = numbers is not None and (int(numbers[1]), int(numbers[2])) < FIRST_WITH_VERSIONS
    return VLLM_WITHOUT_VERSIONS if old else VLLM


class Model(TypedDict):
    """The first card is that of the model; those of adapters have a parent, and no length."""

    id: str
    max_model_len: NotRequired[int | None]
    owned_by: NotRequired[str | None]
    parent: NotRequired[str | None]


class Version(TypedDict):
    version: str


class Models(TypedDict):
    data: Annotated[list[Model], Field(fail_fast=True)]


class WeightInfo(TypedDict):
    weight_version: str


class IsSleeping(TypedDict):
    is_sleeping: bool


class WorldSize(TypedDict):
    world_size: Annotated[int, Field(ge=1, le=inference.MAX_WORKERS)]


VERSION = TypeAdapter(Version)
MODELS = TypeAdapter(Models)
WEIGHT_INFO = TypeAdapter(WeightInfo)
IS_SLEEPING = TypeAdapter(IsSleeping)
WORLD_SIZE = TypeAdapter(WorldSize)
RPC = TypeAdapter(inference.RpcResponse)
SEQUENCE = TypeAdapter(SequenceResponse)


class CompletionRequest(SamplingParams):
    """POST /v1/completions with token ids; the sampling fields are on the same level as the prompt."""

    prompt: list[int]
    request_id: str
    return_token_ids: bool = True
    stream: bool = True


class LoadAdapterRequest(BaseModel):
    """POST /v1/load_lora_adapter: adapters in a directory of the instance's host, which requests then name."""

    lora_name: str
    lora_path: str


class UnloadAdapterRequest(BaseModel):
    """POST /v1/unload_lora_adapter."""

    lora_name: str


def generate_request(
    prompt: list[int], params: SamplingParams, request_id: str, model: str | None = None
) -> inference.GenerateRequest:
    """`model`: the name of an adapter; by default what the server serves."""
    return inference.GenerateRequest(
        token_ids=prompt, sampling_params=params, request_id=request_id, stream=True, model=model
    )


def completion_request(prompt: list[int], params: SamplingParams, request_id: str) -> CompletionRequest:
    # Servers without the generate route do not know these.
    fields = params.model_dump(exclude={"stream_interval", "num_continued", "routed_experts"})
    return CompletionRequest(prompt=prompt, request_id=request_id, **fields)
