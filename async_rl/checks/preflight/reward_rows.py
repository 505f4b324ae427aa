"""Checks that rows have what the reward asks of them, as far as the first ones show: its part's name, an answer."""

from collections.abc import Iterator
from inspect import Signature

from async_rl.checks.preflight.data import NUM_ROWS
from async_rl.checks.preflight.user_file import PREFIX, require_function, signature_of
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.rollouts.data.evaluation_prompts import HELD_OUT, prompts_of_set
from async_rl.rollouts.data.numbered_rows import checked_rows
from async_rl.rollouts.data.part import SourcePart, parts_of
from async_rl.rollouts.data.prompts import first_rows
from async_rl.rollouts.rewards.readable_answers import ANSWERS
from async_rl.rollouts.rewards.row_parts import labels_of
from async_rl.rollouts.rewards.signatures import lacking

NUM_ANSWERS = 100
"""Rows whose answers are looked for: a column that is missing or misnamed shows in the first."""


def require_answers(config: Config, *, trains: bool) -> None:
    """Checks that the first rows of prompts and evaluation sets have the answers that the reward compares with.

    Rows that cannot be read are left to the checks of the data; rows that choose their reward have any. Those of a
    mixture's part that names its rewards need what these read.

    Raises:
        ConfigError: a row has none.
    """
    names = {label: each.name or "" for label, each in config.reward.single_rewards.items()}
    for part, num_rows in _parts(config, trains):
        if config.reward.column is not None and not part.reward:
            continue
        readers = [ANSWERS[names[label]] for label in part.reward or names if names[label] in ANSWERS]
        if not readers:
            continue
        try:
            rows = list(checked_rows(part, part.rows(seed=0), min(num_rows, NUM_ANSWERS)))
        except ConfigError:
            continue
        # Single rows without an answer in the column that should have it are left out of a run.
        answered = [row for row in rows if not row.columns.lacks_answer(row.row)]
        for each in answered or rows:
            try:
                for read in readers:
                    read(each.row)
            except ValueError as error:
                raise ConfigError(
                    f"source {part.source!r}, row {each.number} (from 0): {error}; name the column of answers in "
                    'prompts.columns = { answer = "COLUMN" }'
                ) from error


def require_columns(config: Config, *, trains: bool) -> None:
    """Checks that each parameter of a reward of TRL's or verl's form comes from some of the first rows.

    Other rows may lack it: they give it None. Rows that cannot be read are left to the checks of the data, functions
    that cannot be found or called to those of the reward.

    Raises:
        ConfigError: none of these rows has it.
    """
    for reward in config.reward.single_rewards.values():
        name = reward.name or ""
        try:
            definition = require_function("reward.name", name) if name.startswith(PREFIX) else None
        except ConfigError:
            continue
        if definition is not None and not definition.decorator_list:
            require_columns_of(config, name, signature_of(definition), trains=trains)


def require_columns_of(config: Config, name: str, signature: Signature, *, trains: bool) -> None:
    """The same for the function of the reward, or of a part of it, that has this name in the config.

    Raises:
        ConfigError: see `require_columns`.
    """
    labels = {label for label, each in config.reward.single_rewards.items() if each.name == name}
    try:
        if not lacking(signature, ()):
            return
        parts = [each for each in _parts(config, trains) if not each[0].reward or labels & {*each[0].reward}]
        columns = {column for each in parts for row in first_rows(*each) for column in row}
    except (ConfigError, ValueError):
        return
    if missing := lacking(signature, columns):
        raise ConfigError(
            f"reward.name {name!r} takes {', '.join(missing)}, but the first rows have only "
            f"{', '.join(sorted(columns))}: name the columns that it needs in prompts.columns, or take the "
            "parameter out"
        )


def require_parts_of_rows(config: Config, *, trains: bool) -> None:
    """Checks the first rows of the prompts, if they are trained, and of every evaluation set.

    Rows that cannot be read are left to the checks of the data.

    Raises:
        ConfigError: a row does not name its reward in `reward.column`, or names another one than the config has.
    """
    if config.reward.column is None:
        return
    for part, num_rows in _parts(config, trains):
        try:
            rows = first_rows(part, num_rows)
        except ConfigError:
            continue
        for number, row in enumerate(rows):
            try:
                labels_of(config.reward, row, part.reward)
            except ValueError as error:
                raise ConfigError(f"source {part.source!r}, row {number} (from 0): {error}") from error


def _parts(config: Config, trains: bool) -> Iterator[tuple[SourcePart, int]]:
    """Each source, and how many of its rows are looked at."""
    if trains:
        yield from ((part, NUM_ROWS) for part in parts_of(config.prompts))
    for each in config.evaluation.sets:
        if each.source != HELD_OUT:
            num_rows = min(NUM_ROWS, each.max_prompts or NUM_ROWS)
            yield from ((part, num_rows) for part in parts_of(prompts_of_set(each, config.prompts)))
