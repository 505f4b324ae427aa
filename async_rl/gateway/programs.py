"""The program of a run's rollouts, with the gateway beside it; for the leader."""

from async_rl.config.rollout_section import SINGLE_TURN, RolloutSection
from async_rl.data.prompts import Tokenizer
from async_rl.gateway.command_program import CommandProgram
from async_rl.gateway.gateway import Gateway
from async_rl.gateway.served_program import ServedProgram
from async_rl.programs.user_command import COMMAND
from async_rl.rollout.program import Program
from async_rl.rollout.worker_programs import WorkerProgram


def make_program(rollout: RolloutSection, tokenizer: Tokenizer, address: str | None) -> Program | None:
    """The program that `rollout.program` names; None for a single turn.

    Args:
        address: this host's for agents elsewhere, see `Gateway`.

    Raises:
        ConfigError: there is no such program.
    """
    if rollout.program == SINGLE_TURN:
        return None
    agents = CommandProgram(rollout) if rollout.program.startswith(COMMAND) else WorkerProgram(rollout)
    return ServedProgram(agents, Gateway(rollout, tokenizer, address))
