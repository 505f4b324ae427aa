"""How the rollouts of a run are made: of programs with the gateway beside them."""

from dataclasses import replace

from async_rl.config.rollout_section import SINGLE_TURN
from async_rl.config.sections import Config
from async_rl.data.prompts import Tokenizer
from async_rl.gateway.command_program import CommandProgram
from async_rl.gateway.gateway import Gateway
from async_rl.pool.inference_pool import InferencePool
from async_rl.programs.user_command import COMMAND
from async_rl.rewards import Reward
from async_rl.rollout.group_maker import GroupMaker, SingleTurns
from async_rl.rollout.program import Program, ProgramPrompt, RolloutResult
from async_rl.rollout.program_rollouts import make_program_rollouts
from async_rl.rollout.session import RolloutSession
from async_rl.rollout.worker_programs import WorkerProgram


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


def make_group_maker(
    config: Config, pool: InferencePool, tokenizer: Tokenizer, reward: Reward, address: str | None = None
) -> GroupMaker:
    """That of `rollout.program`; its owner starts it, and closes it in any case.

    Args:
        address: this host's for agents elsewhere, see `Gateway`.

    Raises:
        ConfigError: there is no such program, or no renderer for its messages.
    """
    rollout, seed, skips = config.rollout, config.run.seed, config.reward.skip_special_tokens
    if rollout.program == SINGLE_TURN:
        return SingleTurns(pool, reward, tokenizer, rollout, seed, skip_special_tokens=skips)
    agents = CommandProgram(rollout) if rollout.program.startswith(COMMAND) else WorkerProgram(rollout)
    return make_program_rollouts(
        *(rollout, config.prompts, seed, config.model.path, pool, tokenizer, reward),
        skip_special_tokens=skips,
        program=ServedProgram(agents, Gateway(rollout, tokenizer, address)),
    )
