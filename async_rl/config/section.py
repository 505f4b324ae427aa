"""What all sections of a config have in common."""

import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import AllowInfNan, BaseModel, ConfigDict, PlainSerializer, ValidationInfo, field_validator

from async_rl.config.keys import kinds_of

LONGEST_S = 1e9
"""Of any duration; Python's threads wait for nine times as long at most."""

LARGEST_NUMBER = 2**53
"""Of any whole number without a limit of its own: with some more of them added it is still one of 64 bits."""


Unlimited = Annotated[
    float, AllowInfNan(True), PlainSerializer(lambda value: "inf" if math.isinf(value) else value, when_used="json")
]
"""A limit that may be `inf`, for none; JSON has no such number, and gets the word, which is read back."""


class Section(BaseModel):
    """NaN is not valid for any key, and infinity only for an `Unlimited` one: their comparisons would pass a limit."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _means_what_it_says(cls, value: Any, info: ValidationInfo) -> Any:
        # Both would be misinterpreted: true as the number 1, and an empty path as the working directory.
        kinds = kinds_of(cls.model_fields[info.field_name or ""].annotation)
        if isinstance(value, bool) and bool not in kinds and {int, float} & kinds:
            raise ValueError("Input should be a number, not a truth value")
        if value == "" and Path in kinds:
            raise ValueError("Input should be a path, not empty text; '.' is the working directory")
        # No path, URL or command has one, and texts for a model have none either.
        if isinstance(value, str) and "\0" in value:
            raise ValueError("Input should have no zero character")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _is_within_reach(cls, value: Any, info: ValidationInfo) -> Any:
        # With more, waits and 64-bit libraries raise errors of their own in the middle of a run.
        if isinstance(value, float) and str(info.field_name).endswith("_s") and LONGEST_S < value < math.inf:
            raise ValueError(f"Input should be at most {LONGEST_S:g}, thirty years")
        limits = cls.model_fields[info.field_name or ""].metadata
        is_limited = any(hasattr(limit, "lt") or hasattr(limit, "le") for limit in limits)
        if isinstance(value, int) and value > LARGEST_NUMBER and not is_limited:
            raise ValueError(f"Input should be at most {LARGEST_NUMBER}")
        return value
