"""Rollout programs with the gateway beside them: each rollout has a base URL of its own while it runs."""

from dataclasses import replace

from async_rl.gateway.gateway import Gateway
from async_rl.rollout.program import Program, ProgramPrompt, RolloutResult
from async_rl.rollout.session import RolloutSession


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
