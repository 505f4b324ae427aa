"""Loads the evaluation sets of a config: their prompts are rendered like the training prompts."""

from dataclasses import dataclass

from async_rl.config.sections import EvaluationSection, EvaluationSet, PromptsSection
from async_rl.data.prompts import Tokenizer, load_prompts
from async_rl.errors import ConfigError
from async_rl.seeds import evaluation_rows_seed
from async_rl.types import Prompt


@dataclass(frozen=True, slots=True, eq=False)
class LoadedSet:
    """An evaluation set and its prompts."""

    config: EvaluationSet
    prompts: tuple[Prompt, ...]

    @property
    def name(self) -> str:
        return self.config.name


def load_sets(
    config: EvaluationSection, prompts: PromptsSection, tokenizer: Tokenizer, seed: int
) -> tuple[LoadedSet, ...]:
    """All sets, in the order of the config; `prompts` defines how a prompt is rendered and its maximum length.

    Raises:
        ConfigError: a set cannot be read or is malformed, or two sets have the same name.
    """
    names = [each.name for each in config.sets]
    if len(set(names)) < len(names):
        raise ConfigError(f"evaluation.sets have the names {names}: give each a name of its own")
    return tuple(_load(each, prompts, tokenizer, seed) for each in config.sets)


def _load(config: EvaluationSet, prompts: PromptsSection, tokenizer: Tokenizer, seed: int) -> LoadedSet:
    # A task's rows are generated from a seed: with the run's own they would be the training rows.
    options = prompts.task_options if config.source == prompts.source else {}
    changes = {
        "source": config.source,
        "num_rows": config.max_prompts or prompts.num_rows,
        "task_options": {key: value for key, value in options.items() if key not in ("seed", "size")},
    }
    try:
        loaded = load_prompts(
            prompts.model_copy(update=changes), tokenizer, evaluation_rows_seed(seed), config.max_prompts
        )
    except ConfigError as error:
        raise ConfigError(f"evaluation set {config.name!r}: {error}") from error
    if not loaded:
        raise ConfigError(f"evaluation set {config.name!r}: {config.source!r} has only empty prompts")
    return LoadedSet(config, tuple(loaded))
