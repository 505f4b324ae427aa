"""What all sections of a config have in common, and how the options of one kind of algorithm or reward are read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from async_rl.config.keys import kinds_of
from async_rl.config.secrets import masked
from async_rl.config.texts import matching, said_of
from async_rl.errors import ConfigError

MAX_DURATION_S = 1e9
"""Of any duration; Python's threads wait for nine times as long at most."""

MAX_NUMBER = 2**53
"""Of any whole number without a limit of its own: with some more of them added it is still one of 64 bits."""

PlainName = Annotated[str, matching("[A-Za-z0-9_.-]+", "letters, digits, '_', '.' and '-'")]

ProgramText = Annotated[str, matching(r"[^\x00]*", "a text without a zero character, which no program can be given")]


class Section(BaseModel):
    """Neither NaN nor infinity is valid for any key: their comparisons would pass a limit."""

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
        if isinstance(value, float) and str(info.field_name).endswith("_s") and value > MAX_DURATION_S:
            raise ValueError(f"Input should be at most {MAX_DURATION_S:g}, thirty years")
        limits = cls.model_fields[info.field_name or ""].metadata
        is_limited = any(hasattr(limit, "lt") or hasattr(limit, "le") for limit in limits)
        if isinstance(value, int) and value > MAX_NUMBER and not is_limited:
            raise ValueError(f"Input should be at most {MAX_NUMBER}")
        return value


Options = TypeVar("Options", bound=Section)


class NoOptions(Section):
    """Of an algorithm or a reward that has none."""


def read_options(section: str, name: str | None, options: Mapping[str, Any], kind: type[Options]) -> Options:
    """`[SECTION.options]` of the algorithm or reward `name`, whose options are those of `kind`.

    Raises:
        ConfigError: it has other keys, lacks one, or values do not fit.
    """
    try:
        return kind.model_validate(options)
    except ValidationError as error:
        named = ", ".join(kind.model_fields) or "none"
        lines = [_explain(f"{section}.options", item) for item in error.errors()]
        raise ConfigError(f"{section}.name = {name!r} has the options {named}: correct " + "; ".join(lines)) from error


def _explain(table: str, item: Any) -> str:
    key = ".".join([table, *map(str, item["loc"])])
    if item["type"] == "missing":
        return f"{key}: it is missing, and has no default"
    return f"{key}: {said_of(item)} (got {masked(key, item['input'])!r})"
