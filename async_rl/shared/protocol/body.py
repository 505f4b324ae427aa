"""Types that the bodies of both protocols share."""

from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from async_rl.config.texts import matching

MAX_UNKNOWN_FIELDS: Final = 16
"""That are described one by one: millions of them would take gigabytes."""


def _require_splittable(url: str) -> str:
    """Raises ValueError for a port out of range and for brackets without an IPv6 address."""
    _ = urlsplit(url).port
    return url


_HOST = r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*)"
BaseUrl = Annotated[
    str,
    Field(max_length=2048),
    matching(rf"https?://{_HOST}(:[1-9][0-9]{{0,4}})?", "http://HOST:PORT, and nothing after it"),
    AfterValidator(_require_splittable),
]
"""An instance's address for other hosts: http://host:port, and nothing after it."""


def _require_utf8(text: str) -> str:
    """Raises ValueError for a lone surrogate, which JSON's escapes can make, and which no response could repeat."""
    text.encode()
    return text


Text = Annotated[str, AfterValidator(_require_utf8)]


class Body(BaseModel):
    """A request or response body; unknown fields are ignored, as in vLLM."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class StrictBody(Body):
    """A body whose unknown fields are errors: a misspelt name must not be taken for a default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_unknown(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > len(cls.model_fields) + MAX_UNKNOWN_FIELDS:
            raise ValueError(f"{len(data)} fields, expected {', '.join(cls.model_fields)} at most")
        return data


class ErrorInfo(Body):
    message: str
    type: str
    param: str | None = None
    code: int


class ErrorResponse(Body):
    """Body of every 4xx / 5xx response, as vLLM's."""

    error: ErrorInfo
