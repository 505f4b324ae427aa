"""Loads a run's prompts on every rank: leaders read and tokenize them, the other ranks get the names of the prompts."""

from typing import Any

from async_rl.config.sections import Config
from async_rl.data.prompts import PromptSource, Tokenizer
from async_rl.errors import ConfigError
from async_rl.programs.user_command import COMMAND
from async_rl.programs.user_file import PREFIX, file_identity
from async_rl.rewards.identity import reward_identity
from trainer.checkpoint.compatibility import Contents
from trainer.parallel import Parallel


def load_prompts_and_contents(
    config: Config, parallel: Parallel, tokenizer: Tokenizer
) -> tuple[PromptSource, Contents]:
    """The prompts, and what a checkpoint records of them and of the reward; all ranks call it and wait for the leaders.

    Raises:
        ConfigError: on all ranks; a leader cannot read the source or the reward's file, or reads data that differs from
            another leader's.
    """
    source: PromptSource | None = None
    said: tuple[dict[str, Any] | None, str | None] | None = None
    if parallel.is_leader:
        try:
            source = PromptSource.load(config.prompts, tokenizer, config.run.seed)
            said = Contents(source.table.digests(), _scoring_identity(config)).as_json(), None
        except ConfigError as error:
            said = None, str(error)
    told = [each for each in parallel.gather_json(said) if each is not None]
    for _, failure in told:
        if failure is not None:
            raise ConfigError(failure)
    first = told[0][0]
    if any(contents != first for contents, _ in told):
        raise ConfigError(
            f"leaders of different replicas read different data: prompts.source {config.prompts.source!r} or the file "
            f"of reward.name {config.reward.name!r} or rollout.program {config.rollout.program!r} is not the same on "
            "all hosts"
        )
    numbers = parallel.broadcast_json(source.table.numbers if source is not None and parallel.is_main else None)
    return source or PromptSource.by_name(numbers, config.prompts, config.run.seed), Contents(**first)


def _scoring_identity(config: Config) -> str:
    """Of the reward and of the rollout program: of its file, or of a command its words."""
    reward, program = reward_identity(config.reward.name), config.rollout.program
    if program.startswith(COMMAND):
        return f"{reward}, rollouts by {program}"
    if not program.startswith(PREFIX):
        return reward
    return f"{reward}, rollouts by {file_identity('rollout.program', program)}"
