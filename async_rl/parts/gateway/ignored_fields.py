"""The fields of requests that the run ignores, logged once for each kind; for `server`.

Sampling is the run's: what a client asks of it is ignored.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

log = logging.getLogger(__name__)

NEUTRAL: Mapping[str, Sequence[Any] | None] = {
    "frequency_penalty": (0,),
    "include": ([],),
    "metadata": None,
    "modalities": (["text"],),
    "parallel_tool_calls": None,
    "presence_penalty": (0,),
    "prompt_cache_key": None,
    "prompt_cache_options": None,
    "prompt_cache_retention": None,
    "response_format": ({"type": "text"},),
    "safety_identifier": None,
    "service_tier": None,
    "store": None,
    "stream_options": None,
    "text": ({"format": {"type": "text"}},),
    "top_logprobs": (0,),
    "top_p": (1,),
    "truncation": ("disabled",),
    "user": None,
}
"""Fields that change nothing with any of these values; None: with any value at all."""

MAX_LOGGED = 64
"""Kinds of ignored fields that are logged: a client may invent any number of them."""


class IgnoredFields:
    """Logs each kind of field that requests have and the run ignores, once."""

    def __init__(self, temperature: float) -> None:
        self._neutral = {**NEUTRAL, "temperature": (temperature,)}
        self._logged: set[str] = set()

    def log_new(self, fields: Mapping[str, Any]) -> None:
        """The fields of one request that nothing reads."""
        for name, value in fields.items():
            if value is None or name in self._logged or len(self._logged) == MAX_LOGGED:
                continue
            neutral = self._neutral.get(name, ())
            if neutral is None or value in neutral:
                continue
            self._logged.add(name)
            log.warning(
                "an agent asked for %.40r = %.80r, which is ignored here and in all requests to come: sampling is the "
                "run's own, so that every sample is on-policy (docs/gateway.md)",
                name,
                value,
            )
