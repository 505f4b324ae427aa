"""One source of prompts with the settings that apply to it: the only one of a run, or a part of its mixture."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.config.prompts_section import SOURCES, MixturePart, PromptsSection
from async_rl.errors import ConfigError
from async_rl.rollouts.data.jsonl_rows import JsonlRows
from async_rl.rollouts.data.row import Rows
from async_rl.rollouts.data.tabular_rows import HUB, hub_rows, parquet_rows, saved_rows
from async_rl.rollouts.data.task_rows import QUESTION, REASONING_GYM, TaskRows
from async_rl.rollouts.data.whole_file_rows import csv_rows, json_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePart:
    """Fields are as those of the config's sections; `name` is empty for the only source of a run.

    `max_response_tokens` is None for the run's.
    """

    name: str
    source: str
    weight: float
    columns: Mapping[str, str]
    chat_template: bool
    template_arguments: Mapping[str, Any]
    system_prompt: str | None
    max_prompt_tokens: int
    task_options: Mapping[str, Any]
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    max_response_tokens: int | None
    reward: tuple[str, ...]

    @property
    def prompt_name(self) -> str:
        """Where a row of this part has its prompt, after its columns were mapped."""
        if self.source.startswith(REASONING_GYM) and "prompt" not in self.columns:
            return QUESTION
        return "prompt"

    def rows(self, seed: int) -> Rows:
        """The rows of its source; `seed` is of those that are generated.

        Raises:
            ConfigError: there is no such kind of source.
        """
        if self.source.startswith(REASONING_GYM):
            return TaskRows(self.source, self.task_options, seed)
        if self.source.startswith(HUB):
            return hub_rows(self.source)
        path = Path(self.source)
        if path.suffix == ".jsonl":
            return JsonlRows(path)
        if path.suffix == ".parquet":
            return parquet_rows(path)
        if path.suffix == ".json":
            return json_rows(path)
        if path.suffix == ".csv":
            return csv_rows(path)
        if path.is_dir():
            return saved_rows(self.source)
        raise ConfigError(f"prompts.source is {self.source!r}: expected {SOURCES}")


def parts_of(config: PromptsSection) -> tuple[SourcePart, ...]:
    """The parts of the mixture, or the only source."""
    if config.source is None:
        return tuple(_part(config, part) for part in config.mixture)
    return (
        SourcePart(
            name="",
            source=config.source,
            weight=1.0,
            columns=config.columns,
            chat_template=bool(config.chat_template),
            template_arguments=config.template_arguments,
            system_prompt=config.system_prompt,
            max_prompt_tokens=config.max_prompt_tokens,
            task_options=config.task_options,
            stop=(),
            stop_token_ids=(),
            max_response_tokens=None,
            reward=(),
        ),
    )


def _part(config: PromptsSection, part: MixturePart) -> SourcePart:
    return SourcePart(
        name=part.name,
        source=part.source,
        weight=part.weight,
        columns=part.columns,
        chat_template=bool(config.chat_template),
        template_arguments=config.template_arguments,
        system_prompt=config.system_prompt if part.system_prompt is None else part.system_prompt,
        max_prompt_tokens=config.max_prompt_tokens,
        task_options=part.task_options,
        stop=part.stop,
        stop_token_ids=part.stop_token_ids,
        max_response_tokens=part.max_response_tokens,
        reward=part.reward,
    )
