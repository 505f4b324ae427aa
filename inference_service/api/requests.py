"""Request bodies as this server accepts them, and the `/v1/completions` bodies, which only servers need.

A field this engine does not support is refused unless it has its neutral value: sampling that silently differs from the
request would corrupt a run.
"""

from typing import Annotated, Any, Final, Self, TypeVar

from pydantic import ConfigDict, Field, model_validator

from async_rl.shared.protocol.body import Body, Text
from async_rl.shared.protocol.inference import GenerateRequest, SamplingParams, TokenIds, Usage
from async_rl.shared.protocol.routes import OWNED_BY_EMBEDDED

T = TypeVar("T")

MAX_RESPONSES: Final = 16_384
"""To one request: each takes memory from the beginning on, while 32 MiB have room for millions of prompts."""

Batch = Annotated[list[T], Field(min_length=1, max_length=MAX_RESPONSES, fail_fast=True)]

WITHOUT_EFFECT: Final = frozenset(
    {
        "cache_salt",
        "detokenize",
        "include_stop_str_in_output",
        "output_kind",
        "priority",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "token_offsets",
        "user",
    }
)
"""Fields of vLLM that have no effect on this server's responses."""

NEUTRAL: Final[dict[str, Any]] = {"best_of": 1, "length_penalty": 1.0, "output_mode": "tokens"}
"""Values, besides false and empty ones, with which a field of vLLM has no effect."""


SAYS_SO: Final = ConfigDict(json_schema_extra={"additionalProperties": False})
"""For the OpenAPI document: other fields are refused, by `refuse_unknown`."""


def refuse_unknown(data: Any, known: type[Body]) -> Any:
    """Returns the body if every field that `known` lacks has a value without effect."""
    if isinstance(data, dict):
        for name, value in data.items():
            if name in known.model_fields or name in WITHOUT_EFFECT or not value or NEUTRAL.get(name) == value:
                continue
            # As a Python literal: JSON escapes can produce names that UTF-8 cannot encode.
            raise ValueError(f"{name!r} = {value!r:.200} is not supported by this engine: leave it out")
    return data


class ServedSamplingParams(SamplingParams):
    """Bounded to values that float32 logits can be multiplied with."""

    model_config = SAYS_SO

    temperature: float = Field(1.0, ge=0.0, le=1e6)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100.0)

    @model_validator(mode="before")
    @classmethod
    def _honours_all(cls, data: Any) -> Any:
        return refuse_unknown(data, cls)


class ServedGenerateRequest(GenerateRequest):
    model_config = SAYS_SO

    sampling_params: ServedSamplingParams

    @model_validator(mode="before")
    @classmethod
    def _honours_all(cls, data: Any) -> Any:
        return refuse_unknown(data, cls)


class CompletionRequest(ServedSamplingParams):
    """POST /v1/completions: sampling parameters and the prompt, which is text or token ids, or a list of either."""

    prompt: TokenIds | Batch[TokenIds] | Text | Batch[Text]
    model: str | None = None
    request_id: Text | None = None
    stream: bool | None = False
    echo: bool | None = False
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @model_validator(mode="after")
    def _echoes_a_prompt_alone(self) -> Self:
        if self.echo and self.logprobs is not None and self.num_continued:
            raise ValueError(f"num_continued = {self.num_continued} beside echo and logprobs: leave one of them out")
        return self


class CompletionLogprobs(Body):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Body):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None
    stop_reason: int | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: None = None
    prompt_token_ids: list[int] | None = None


class CompletionChunk(Body):
    """One event of a streaming response; text, token ids and log-probs of a choice are deltas."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]


class CompletionResponse(CompletionChunk):
    usage: Usage
    system_fingerprint: str | None = None


class AbortResponse(Body):
    """How many requests were ended."""

    status: str = "aborted"
    aborted: int


class ModelCard(Body):
    id: str
    object: str = "model"
    created: int
    owned_by: str = OWNED_BY_EMBEDDED
    root: str
    parent: str | None = None
    max_model_len: int
    permission: list[Any] = Field(default_factory=list)


class ModelList(Body):
    object: str = "list"
    data: list[ModelCard]
