"""The `[reward]` section: one reward, or several parts with weights; and the `[reward.options]` of each kind."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator, model_validator

from async_rl.config.secrets import PLACE_OF_TOKEN
from async_rl.config.section import NoOptions, Options, Section, read_options
from async_rl.config.texts import matching
from async_rl.errors import ConfigError

BUILT_IN = ("math", "multiple_choice", "exact", "f1", "regex", "reasoning_gym", "code", "http", "judge")
"""Each is the file of its name in `async_rl/rollouts/rewards/`, or in an optional part."""


class CodeOptions(Section):
    test_timeout_s: float = Field(3.0, gt=0, description="for one unit test of a response")
    test_memory_bytes: int = Field(
        512 * 2**20, ge=64 * 2**20, description="memory and files of all processes of one response"
    )


class _WithPatterns(Section):
    @field_validator("pattern", "score_pattern", check_fields=False)
    @classmethod
    def _is_a_regular_expression(cls, pattern: str | None, info: ValidationInfo) -> str | None:
        try:
            num_groups = 1 if pattern is None else re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"it is no regular expression: {error}") from error
        if info.field_name == "score_pattern" and num_groups != 1:
            raise ValueError(f"it has {num_groups} groups: put the number, and nothing else, in parentheses")
        return pattern


class RegexOptions(_WithPatterns):
    pattern: str | None = Field(
        None, description="what a response has to match, `.` line breaks too; by default the row's `pattern`"
    )
    match: Literal["full", "search"] = Field(
        "full", description="the whole response, without space around it, has to match, or any part of it"
    )


class HTTPOptions(Section):
    url: str = Field(description="where groups are posted; of judge: base URL of an OpenAI-compatible server, with /v1")
    token_from: Annotated[str, matching(PLACE_OF_TOKEN, "env:VARIABLE or file:PATH")] | None = Field(
        None,
        description="where the bearer token is, env:VARIABLE or file:PATH; never the token itself",
    )
    correct_at: float | None = Field(None, description="the least reward of a correct response; by default none is")

    @field_validator("url")
    @classmethod
    def _is_of_a_service(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            is_sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            is_sound = False
        if not is_sound:
            raise ValueError("it is no URL: write http://HOST:PORT/PATH or https://HOST/PATH")
        if parts.username or parts.password:
            raise ValueError("it contains a user or a password, which checkpoints would record: use token_from")
        return url


class JudgeOptions(HTTPOptions, _WithPatterns):
    model: str = Field(description="the judge's name at the server")
    rubric: str = Field(
        description="what it is asked, a text or the path of one; {response} stands for the response, {prompt}, "
        "{answer} and so on for columns of the row",
    )
    score_pattern: str | None = Field(
        None,
        description="a regular expression whose group is the score, where it matches last; by default the number in "
        "the last line",
    )
    min_score: float = Field(0.0, description="the worst score, which becomes the reward 0")
    max_score: float = Field(1.0, description="the best score, which becomes the reward 1")
    unreadable_reward: float | None = Field(
        None, description="of a response for which it gives no score three times; by default an error"
    )

    @model_validator(mode="after")
    def _scale_has_a_range(self) -> "JudgeOptions":
        if self.min_score >= self.max_score:
            raise ValueError(
                f"min_score is {self.min_score:g} and max_score {self.max_score:g}: the first has to be less"
            )
        return self


OPTIONS: Mapping[str | None, type[Section]] = {
    "code": CodeOptions,
    "regex": RegexOptions,
    "http": HTTPOptions,
    "judge": JudgeOptions,
}
"""By the reward's name; those of the others are `NoOptions`."""


def _require_options(name: str | None, options: Mapping[str, Any]) -> None:
    read_options("reward", name, options, OPTIONS.get(name, NoOptions))


class RewardSettings(Section):
    """Of one reward: those of `[reward]`, and of each of its parts."""

    name: str | None = Field(
        None,
        description=f"{', '.join(BUILT_IN)}, or python:path/to/file.py:function; none if a program rewards itself",
    )
    timeout_s: float = Field(30.0, gt=0, description="for one group, from when its call begins")
    num_workers: int = Field(1, ge=1, description="processes that run the reward")
    max_concurrency: int = Field(
        64,
        ge=1,
        description="calls of an asynchronous reward under way at once (judge: requests); a synchronous one has one "
        "per process",
    )
    max_attempts: int = Field(
        1, ge=1, description="a call that raises, hangs or returns nonsense so often for one group ends the run"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="of the reward itself (see rewards.md)")

    def read_options(self, kind: type[Options]) -> Options:
        """
        Raises:
            ConfigError: `reward.options` are not those of `kind`.
        """
        return read_options("reward", self.name, self.options, kind)


class RewardPart(RewardSettings):
    """`[[reward.parts]]`: a reward and its weight; settings that it leaves out are those of `[reward]`."""

    name: str = Field(description="of the reward, as reward.name")
    weight: float = Field(1.0, ge=-1e6, le=1e6, description="the total is the sum of weight x reward over the parts")
    label: Annotated[str, matching("[A-Za-z0-9_./-]+", "letters, digits, '_', '.', '/' and '-'")] | None = Field(
        None, description="as figures and rows call it; by default its name"
    )

    @property
    def known_as(self) -> str:
        return self.label or self.name


class RewardSection(RewardSettings):
    parts: tuple[RewardPart, ...] = Field((), description="rewards that are added up, instead of reward.name")
    column: str | None = Field(
        None, description="column in which a row names the part, or the list of parts, that score it; by default all do"
    )

    @property
    def is_given(self) -> bool:
        """Whether there is any reward."""
        return self.name is not None or bool(self.parts)

    @property
    def weights(self) -> dict[str, float]:
        """Of the parts, by label."""
        return {part.known_as: part.weight for part in self.parts}

    @property
    def single_rewards(self) -> "dict[str, RewardSection]":
        """Each reward alone: the parts by their labels, else the one that is named by its name."""
        if not self.parts:
            return {} if self.name is None else {self.name: self}
        shared = self.model_dump(exclude_unset=True, exclude={"parts", "column"})
        own = {"label", "weight"}
        return {
            part.known_as: RewardSection.model_validate(shared | part.model_dump(exclude_unset=True, exclude=own))
            for part in self.parts
        }

    @model_validator(mode="after")
    def _options_are_known(self) -> "RewardSection":
        if self.name is not None:
            _require_options(self.name, self.options)
        faults = []
        for part in self.parts:
            is_own = "options" in part.model_fields_set
            try:
                _require_options(part.name, part.options if is_own else self.options)
            except ConfigError as error:
                whose = "" if is_own or not self.options else "[reward.options], which it takes over: "
                remedy = "; write options of one part below it, as [reward.parts.options]" if whose else ""
                faults.append(f"[[reward.parts]] {part.known_as!r}: {whose}{error}{remedy}")
        if faults:
            raise ValueError("\n".join(faults))
        return self

    @model_validator(mode="after")
    def _parts_stand_for_the_reward(self) -> "RewardSection":
        if self.parts and self.name is not None:
            raise ValueError(
                f"reward.name is {self.name!r}, but there are also [[reward.parts]]: make it one of them, or remove "
                "them"
            )
        labels = [part.known_as for part in self.parts]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"several [[reward.parts]] are called {twice[0]!r}: give each a label of its own")
        return self
