"""Checks that prompts and evaluation sets can be read, as far as their first rows show."""

from async_rl.config.prompts_section import PromptsSection
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.rollouts.data.evaluation_prompts import HELD_OUT, prompts_of_set
from async_rl.rollouts.data.order import shares_of
from async_rl.rollouts.data.part import SourcePart, parts_of
from async_rl.rollouts.data.prompts import REASONING_GYM, first_rows
from async_rl.rollouts.data.task_rows import NUM_ROWS as TASK_ROWS

NUM_ROWS = 1000
"""How many rows are checked: enough to find a wrong column or a broken file, few enough to be read quickly."""


def require_prompts(config: PromptsSection) -> None:
    """Checks the first rows of the sources, and that there are enough for one batch, also without those held out.

    Raises:
        ConfigError: one cannot be read, a row does not match the config, or there are too few rows.
    """
    parts = parts_of(config)
    most = max(NUM_ROWS, config.num_drawn)
    counts = [_look_at(part, most) for part in parts]
    num_rows = sum(counts)
    if num_rows < config.num_drawn:
        what = "prompts.mixture" if config.mixture else f"prompts.source {config.source!r}"
        raise ConfigError(
            f"{what} has {num_rows} rows, fewer than {config.drawn_keys}: give more rows or a smaller batch"
        )
    shares = shares_of([part.weight for part in parts], config.num_drawn)
    for part, count, share in zip(parts, counts, shares, strict=True):
        if count < share:
            raise ConfigError(
                f"prompts.mixture {part.name!r} has {count} rows, but its weight {part.weight:g} gives it {share} of "
                f"{config.drawn_keys}: give more rows or a smaller weight"
            )
    # A share of the rows is known only when all are read; a source with `most` rows may have more.
    num_held_out = int(config.held_out)
    if max(counts) < most and num_rows - num_held_out < config.num_drawn:
        raise ConfigError(
            f"prompts.held_out is {num_held_out}, which leaves {max(num_rows - num_held_out, 0)} of {num_rows} rows "
            f"for {config.drawn_keys}: hold out fewer, give more rows or a smaller batch"
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
        if each.source == HELD_OUT:
            if not config.prompts.held_out:
                raise ConfigError(
                    f"evaluation set {each.name!r} has the source {HELD_OUT}, but prompts.held_out is not set: set it "
                    "to a share or a number of prompts"
                )
            continue
        try:
            (part,) = parts_of(prompts_of_set(each, config.prompts))
            _look_at(part, min(NUM_ROWS, each.max_prompts or NUM_ROWS))
        except ConfigError as error:
            raise ConfigError(f"evaluation set {each.name!r}: {error}") from error


def _look_at(part: SourcePart, max_rows: int) -> int:
    """The number of rows, `max_rows` at most; checks each of them."""
    if part.source.startswith(REASONING_GYM):
        # One row shows whether task and options are compatible; the same code generates the others.
        first_rows(part, 1)
        return int(part.task_options.get("size", TASK_ROWS))
    return len(first_rows(part, max_rows))
