"""Types that the bodies of both protocols share."""

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _require_splittable(url: str) -> str:
    """Raises ValueError for a port out of range and for brackets without an IPv6 address."""
    _ = urlsplit(url).port
    return url


_HOST = r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*)"
BaseUrl = Annotated[
    str, Field(pattern=rf"^https?://{_HOST}(:[1-9]\d{{0,4}})?$", max_length=2048), AfterValidator(_require_splittable)
]
"""An instance's address for other hosts: http://host:port, and nothing after it."""


class Body(BaseModel):
    """A request or response body; unknown fields are ignored, as in vLLM."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class ErrorInfo(Body):
    message: str
    type: str
    param: str | None = None
    code: int


class ErrorResponse(Body):
    """Body of every 4xx / 5xx response, as vLLM's."""

    error: ErrorInfo
