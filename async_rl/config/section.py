"""What all sections of a config have in common."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from async_rl.config.keys import kinds_of


class Section(BaseModel):
    """Infinity and NaN are not valid for any key: their comparisons would pass a limit."""

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
        return value
