"""Rows of a reasoning-gym task, which are generated; they stay in memory."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from async_rl.errors import ConfigError
from async_rl.rollouts.data.row import Row

REASONING_GYM = "reasoning-gym:"

QUESTION = "question"

NUM_ROWS = 10_000
"""Generated where the options of the task have no `size`."""


class TaskRows:
    """Implements `Rows`: question, answer, metadata, and the reward's inputs for scoring them (task, task_options)."""

    def __init__(self, source: str, task_options: Mapping[str, Any], seed: int) -> None:
        self._source = source
        self._task = source.removeprefix(REASONING_GYM)
        self._given = task_options
        self._options = {"seed": seed, "size": NUM_ROWS, **task_options}
        self._rows: list[Row] = []
        self._all = False

    def identity(self) -> None:
        """They are generated again."""

    def scan(self) -> Iterator[tuple[int, Row]]:
        for place, row in self._generate() if not self._all else enumerate(self._rows):
            if place == len(self._rows):
                self._rows.append(row)
            yield place, row
        self._all = True

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...

    def row_at(self, place: int) -> Row:
        return self._rows[place]

    def _generate(self) -> Iterator[tuple[int, Row]]:
        try:
            for place, entry in enumerate(import_module("reasoning_gym").create_dataset(self._task, **self._options)):
                yield (
                    place,
                    {
                        "question": entry["question"],
                        "answer": entry["answer"],
                        "metadata": entry["metadata"],
                        "task": self._task,
                        "task_options": self._options,
                    },
                )
        except ImportError as error:
            raise ConfigError(
                f"prompts.source {self._source!r} needs reasoning-gym: install async-rl[tasks]"
            ) from error
        # The task's own validation uses assertions.
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"prompts.source {self._source!r} with prompts.task_options {dict(self._given)} does not work: {error}"
            ) from error
