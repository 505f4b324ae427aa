"""Checks that prompts and evaluation sets can be read, as far as their first rows show."""

from async_rl.config.sections import Config, PromptsSection
from async_rl.data.prompts import REASONING_GYM, first_rows
from async_rl.errors import ConfigError

NUM_ROWS = 1000
"""How many rows are checked: enough to find a wrong column or a broken file, few enough to be read quickly."""


def require_prompts(config: PromptsSection) -> None:
    """Checks the first rows of `prompts.source`, and that there are enough for one batch.

    Raises:
        ConfigError: it cannot be read, a row does not match the config, or there are too few rows.
    """
    num_rows = _look_at(config, max(NUM_ROWS, config.prompts_per_batch))
    if num_rows < config.prompts_per_batch:
        raise ConfigError(
            f"prompts.source {config.source!r} has {num_rows} rows, fewer than prompts.prompts_per_batch = "
            f"{config.prompts_per_batch}: give more rows or a smaller batch"
        )


def require_evaluation_sets(config: Config) -> None:
    """Checks the first rows of every evaluation set.

    Raises:
        ConfigError: one cannot be read, or two have the same name.
    """
    names = [each.name for each in config.evaluation.sets]
    if len(set(names)) < len(names):
        raise ConfigError(f"evaluation.sets have the names {names}: give each a name of its own")
    for each in config.evaluation.sets:
        changes = {"source": each.source, "num_rows": each.max_prompts or config.prompts.num_rows}
        try:
            _look_at(config.prompts.model_copy(update=changes), min(NUM_ROWS, each.max_prompts or NUM_ROWS))
        except ConfigError as error:
            raise ConfigError(f"evaluation set {each.name!r}: {error}") from error


def _look_at(config: PromptsSection, max_rows: int) -> int:
    """The number of rows, `max_rows` at most; checks each of them."""
    if config.source.startswith(REASONING_GYM):
        # One row shows whether task and options are compatible; the same code generates the others.
        first_rows(config, 1)
        return config.num_rows
    return len(first_rows(config, max_rows))
