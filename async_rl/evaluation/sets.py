"""Loads the evaluation sets of a config: their prompts are rendered like the training prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from async_rl.config.evaluation_section import EvaluationSection, EvaluationSet
from async_rl.config.prompts_section import PromptsSection
from async_rl.errors import ConfigError
from async_rl.method.seeds import evaluation_rows_seed
from async_rl.method.types import NO_CHECK, AnswerCheck, Prompt, part_of
from async_rl.rollouts.data.evaluation_prompts import HELD_OUT, prompts_of_set
from async_rl.rollouts.data.prompts import PromptSource, Tokenizer, load_prompts


@dataclass(frozen=True, slots=True, eq=False)
class LoadedSet:
    """An evaluation set and its prompts."""

    config: EvaluationSet
    prompts: tuple[Prompt, ...]

    @property
    def name(self) -> str:
        return self.config.name


DATA_SOURCE = "data_source"
"""The column of verl's data sets with the name of the data set that a row was taken from."""


def source_of(prompt: Prompt) -> str:
    """The source that a prompt of a set comes from: its part of a mixture, else what its row names; else empty."""
    named = prompt.row.get(DATA_SOURCE)
    return part_of(prompt.prompt_id) or (named if isinstance(named, str) else "")


def load_sets(
    config: EvaluationSection,
    prompts: PromptsSection,
    tokenizer: Tokenizer,
    seed: int,
    held_out: Sequence[Prompt] | None = None,
    answers: AnswerCheck = NO_CHECK,
) -> tuple[LoadedSet, ...]:
    """All sets, in the order of the config; `prompts` defines how a prompt is rendered and its maximum length.

    Args:
        held_out: the prompts held out of training; loaded here if they are needed and None.
        answers: leaves out rows whose answers the reward cannot read.

    Raises:
        ConfigError: a set cannot be read or is malformed, or two sets have the same name.
    """
    names = [each.name for each in config.sets]
    if len(set(names)) < len(names):
        raise ConfigError(f"evaluation.sets have the names {names}: give each a name of its own")
    if held_out is None and any(each.source == HELD_OUT for each in config.sets):
        held_out = PromptSource.load(prompts, tokenizer, seed, answers=answers).held_out
    return tuple(_load(each, prompts, tokenizer, seed, held_out or (), answers) for each in config.sets)


def _load(
    config: EvaluationSet,
    prompts: PromptsSection,
    tokenizer: Tokenizer,
    seed: int,
    held_out: Sequence[Prompt],
    answers: AnswerCheck,
) -> LoadedSet:
    loaded: Sequence[Prompt] = held_out
    if config.source != HELD_OUT:
        try:
            own = prompts_of_set(config, prompts)
            loaded = load_prompts(own, tokenizer, evaluation_rows_seed(seed), config.max_prompts, answers)
        except ConfigError as error:
            raise ConfigError(f"evaluation set {config.name!r}: {error}") from error
        if not loaded:
            raise ConfigError(f"evaluation set {config.name!r}: {config.source!r} has only empty prompts")
    if not loaded:
        raise ConfigError(
            f"evaluation set {config.name!r}: prompts.held_out = {prompts.held_out} leaves no prompt for it: raise it"
        )
    return LoadedSet(config, tuple(islice(loaded, config.max_prompts)))
