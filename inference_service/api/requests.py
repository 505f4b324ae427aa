"""Request bodies as this server accepts them.

A field this engine does not support is refused unless it has its neutral value: sampling that silently differs from the
request would corrupt a run.
"""

from typing import Any, Final

from pydantic import ConfigDict, Field, model_validator

from async_rl.shared.protocol.body import Body
from async_rl.shared.protocol.inference import GenerateRequest, SamplingParams
from async_rl.shared.protocol.routes import OWNED_BY_EMBEDDED

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
