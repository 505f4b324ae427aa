"""Loads a run's prompts on every rank: leaders read and tokenize them, the other ranks get the names of the prompts."""

from dataclasses import asdict
from typing import Any

from async_rl.config.sections import Config
from async_rl.data.prompts import PromptSource, Tokenizer
from async_rl.errors import ConfigError, WriteFailed
from async_rl.programs.user_command import COMMAND
from async_rl.programs.user_file import PREFIX, file_identity
from async_rl.rewards.identity import reward_identity
from async_rl.rewards.readable_answers import answer_check
from trainer.checkpoint.compatibility import Contents
from trainer.parallel import Parallel

CACHE = "prompts"
"""The directory of tokenized prompts, below that of the run."""


def load_prompts_and_contents(
    config: Config, parallel: Parallel, tokenizer: Tokenizer
) -> tuple[PromptSource, Contents]:
    """The prompts, and what a checkpoint records of them, of the reward and of the algorithm.

    All ranks call it and wait for the leaders.

    Raises:
        ConfigError: on all ranks; a leader cannot read a source or a file of the user's, or reads data that differs
            from another leader's.
        WriteFailed: on all ranks; a leader has no room for the tokenized prompts.
    """
    source: PromptSource | None = None
    said: tuple[dict[str, Any] | None, tuple[str, bool] | None] | None = None
    if parallel.is_leader:
        try:
            source = PromptSource.load(
                config.prompts, tokenizer, config.run.seed, config.run.dir / CACHE, answer_check(config.reward)
            )
            contents = Contents(source.digests, _scoring_identity(config), _algorithm_identity(config))
            said = contents.as_json(), None
        except (ConfigError, WriteFailed) as error:
            said = None, (str(error), isinstance(error, WriteFailed))
    told = [each for each in parallel.gather_json(said) if each is not None]
    for _, failure in told:
        if failure is not None:
            message, no_room = failure
            raise WriteFailed(message) if no_room else ConfigError(message)
    first = told[0][0]
    if any(contents != first for contents, _ in told):
        raise ConfigError(
            f"leaders of different replicas read different data: the source of prompts {_sources(config)} or a file "
            f"of the reward {', '.join(config.reward.single_rewards)!r}, of rollout.program "
            f"{config.rollout.program!r} or of algorithm.name {config.algorithm.name!r} is not the same on all hosts"
        )
    mine = [asdict(each) for each in source.outlines] if source is not None and parallel.is_main else None
    outlines = parallel.broadcast_json(mine)
    return source or PromptSource.by_outlines(outlines, config.prompts, config.run.seed), Contents(**first)


def _sources(config: Config) -> str:
    return ", ".join(repr(part.source) for part in config.prompts.mixture) or repr(config.prompts.source)


def _scoring_identity(config: Config) -> str:
    """Of the reward and of the rollout program: of its file, or of a command its words."""
    reward, program = reward_identity(config.reward), config.rollout.program
    if program.startswith(COMMAND):
        return f"{reward}, rollouts by {program}"
    if not program.startswith(PREFIX):
        return reward
    return f"{reward}, rollouts by {file_identity('rollout.program', program)}"


def _algorithm_identity(config: Config) -> str:
    return file_identity("algorithm.name", config.algorithm.name) if config.algorithm.is_own else ""
