"""Rollout programs with the gateway beside them."""

from dataclasses import replace

from async_rl.config.rollout_section import RolloutSection
from async_rl.parts.gateway.command_program import CommandProgram
from async_rl.parts.gateway.gateway import Gateway
from async_rl.rollouts.agents.program import Program, ProgramPrompt, RolloutResult
from async_rl.rollouts.agents.session import RolloutSession
from async_rl.rollouts.agents.worker_programs import WorkerProgram
from async_rl.rollouts.data.prompts import Tokenizer
from async_rl.shared.programs.user_command import COMMAND


class ServedProgram:
    """Implements `Program` with another one, whose prompts get the base URL and the key of their rollout."""

    def __init__(self, program: Program, gateway: Gateway) -> None:
        self._program = program
        self._gateway = gateway

    async def start(self) -> None:
        if not self._gateway.url:
            await self._gateway.start()
        await self._program.start()

    async def run(self, prompt: ProgramPrompt, session: RolloutSession) -> RolloutResult:
        with self._gateway.serving(session) as access:
            return await self._program.run(replace(prompt, base_url=access.base_url, api_key=access.key), session)

    async def close(self) -> None:
        try:
            await self._program.close()
        finally:
            await self._gateway.stop()


def make_served_program(rollout: RolloutSection, tokenizer: Tokenizer, address: str | None) -> Program:
    """That of `rollout.program`.

    Args:
        address: this host's for agents elsewhere, see `Gateway`.

    Raises:
        ConfigError: there is no such program.
    """
    program = CommandProgram(rollout) if rollout.program.startswith(COMMAND) else WorkerProgram(rollout)
    return ServedProgram(program, Gateway(rollout, tokenizer, address))
