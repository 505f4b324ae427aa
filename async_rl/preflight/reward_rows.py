"""Checks that rows name parts of the reward which exist, as far as their first rows show."""

from collections.abc import Iterator

from async_rl.config.sections import Config
from async_rl.data.evaluation_prompts import HELD_OUT, prompts_of_set
from async_rl.data.part import Part, parts_of
from async_rl.data.prompts import first_rows
from async_rl.errors import ConfigError
from async_rl.preflight.data import NUM_ROWS
from async_rl.rewards.row_parts import labels_of


def require_parts_of_rows(config: Config, *, trains: bool) -> None:
    """Checks the first rows of the prompts, if they are trained, and of every evaluation set.

    Rows that cannot be read are left to the checks of the data.

    Raises:
        ConfigError: a row does not name its reward in `reward.column`, or names another one than the config has.
    """
    if config.reward.column is None:
        return
    for part in _parts(config, trains):
        try:
            rows = first_rows(part, NUM_ROWS)
        except ConfigError:
            continue
        for number, row in enumerate(rows):
            try:
                labels_of(config.reward, row, part.reward)
            except ValueError as error:
                raise ConfigError(f"source {part.source!r}, row {number} (from 0): {error}") from error


def _parts(config: Config, trains: bool) -> Iterator[Part]:
    if trains:
        yield from parts_of(config.prompts)
    for each in config.evaluation.sets:
        if each.source != HELD_OUT:
            yield from parts_of(prompts_of_set(each, config.prompts))
