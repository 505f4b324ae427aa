"""Environments of verifiers 0.4 for rollout programs: its tasksets and agents, in a virtual environment of their own.

    environment = VerifiersEnvironment("env.toml", python=".venv-verifiers/bin/python")

    async def rollout(prompt, policy):
        return await environment.play(prompt)

The rows of the data are the taskset's tasks: `python -m async_rl.parts.environments.verifiers_rows`. One process
(`verifiers_service.py`) plays all episodes of a program's process; the agents that it runs talk to the gateway.
"""

import asyncio
import contextvars
import json
import os
import shutil
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from async_rl.errors import ConfigError
from async_rl.parts.environments.failure import EnvironmentFailed
from async_rl.rollouts.agents.program import ProgramPrompt
from async_rl.rollouts.agents.turn import LimitReached
from async_rl.shared.programs.agent_process import agent_environment, start_guarded

PYTHON = ".venv-verifiers/bin/python"

SERVICE = Path(__file__).with_name("verifiers_service.py")

LIMIT_CODES = ("rollout_limit_reached", "context_length_exceeded")
"""What the gateway says to an agent of a rollout at its limit, which then may fail."""

END_GRACE_S = 5.0
"""Between SIGTERM and SIGKILL: agents' working directories are removed."""

NO_TIMEOUT = aiohttp.ClientTimeout()
"""A rollout has a time limit; its end cancels the request, and with it the episode."""


@dataclass(frozen=True, slots=True, eq=False)
class _Service:
    """A running service. Its guard ends it, with all processes of its agents, when we end or let go of `process`."""

    process: Process
    socket: Path

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    def session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            "http://verifiers", connector=aiohttp.UnixConnector(str(self.socket)), timeout=NO_TIMEOUT
        )

    async def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        await self.process.wait()
        shutil.rmtree(self.socket.parent, ignore_errors=True)


class VerifiersEnvironment:
    """The environment of a config; its process starts with the first episode, and again if it has ended."""

    def __init__(self, config: str, python: str = PYTHON) -> None:
        """
        Args:
            config: a file as `vf-eval` reads it, of which `[env]` counts. Modules beside it can be imported there.
            python: the interpreter that has verifiers.

        Raises:
            ConfigError: there is no such file or interpreter.
        """
        self._config = Path(config)
        self._python = shutil.which(python)
        if not self._config.is_file():
            raise ConfigError(f"no config of verifiers at {config!r}: write [env.taskset] and [env.agent] there")
        if self._python is None:
            raise ConfigError(
                f"no Python at {python!r}: make one for verifiers, `python -m venv .venv-verifiers` and "
                "`.venv-verifiers/bin/pip install verifiers==0.4.0 uv`, and name it"
            )
        self._starting: asyncio.Task[_Service] | None = None

    async def play(self, prompt: ProgramPrompt) -> float | None:
        """Plays the episode of the task in the prompt's row; returns the policy's reward, None if the task has none.

        Raises:
            EnvironmentFailed: see there.
            LimitReached: its agent failed because the rollout has reached a limit.
            ConfigError: the row has no task.
        """
        if "task" not in prompt.row:
            raise ConfigError(
                f"the row of prompt {prompt.prompt_id!r} has no task (it has {sorted(prompt.row)}): write the data "
                "with `python -m async_rl.parts.environments.verifiers_rows`"
            )
        service = await self._service(urlsplit(prompt.base_url).hostname or "")
        asked = {"task": prompt.row["task"], "base_url": prompt.base_url}
        try:
            async with service.session() as session, session.post("/episodes", json=asked) as response:
                response.raise_for_status()
                said = await response.json()
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            # Until it has ended, so that the next episode starts another one.
            await service.close()
            raise EnvironmentFailed(f"the process of {self._config} failed: {error!r}") from error
        if "error" in said:
            raise self._failure(said["error"])
        reward: float | None = said["reward"]
        return reward

    async def rows(self, limit: int | None = None) -> AsyncIterator[dict[str, Any]]:
        """The taskset's tasks, or the first `limit` of them, as rows: `prompt`, and `task` for `play`.

        Raises:
            EnvironmentFailed: see there.
        """
        service = await self._start("")
        query = {} if limit is None else {"limit": str(limit)}
        try:
            async with service.session() as session, session.get("/tasks", params=query) as response:
                async for line in response.content:
                    row = json.loads(line)
                    if "error" in row:
                        raise self._failure(row["error"])
                    yield row
        finally:
            await service.close()

    def _failure(self, fault: str) -> Exception:
        if any(code in fault for code in LIMIT_CODES):
            # Which limit it was, its session knows.
            return LimitReached("turns", fault)
        return EnvironmentFailed(f"the environment of {self._config} failed:\n{fault}")

    async def _service(self, gateway: str) -> _Service:
        starting = self._starting
        if starting is None or (starting.done() and (starting.exception() or not starting.result().running)):
            # Outside of the context of this rollout, whose end would cancel it.
            context = contextvars.Context()
            starting = self._starting = asyncio.create_task(self._start(gateway), context=context)
        return await asyncio.shield(starting)

    async def _start(self, gateway: str) -> _Service:
        """
        Raises:
            EnvironmentFailed: it cannot serve the config.
        """
        assert self._python is not None
        socket = Path(tempfile.mkdtemp(prefix="async-rl-verifiers-")) / "socket"
        # Without the modules beside the service, whose names are those of other packages.
        command = [self._python, "-P", str(SERVICE), str(self._config), str(socket)]
        process = await start_guarded(command, self._variables(gateway), END_GRACE_S)
        service = _Service(process, socket)
        assert process.stdout is not None
        line = await process.stdout.readline()
        fault = json.loads(line).get("error") if line else "see its output, above"
        if fault:
            await service.close()
            raise EnvironmentFailed(f"{self._python} cannot serve the environment of {self._config}: {fault}")
        return service

    def _variables(self, gateway: str) -> dict[str, str]:
        variables = agent_environment(gateway, "127.0.0.1", "localhost")
        programs = str(Path(self._python or "").parent.absolute())
        modules = str(self._config.parent.absolute())
        return {
            **variables,
            # `uv`, which verifiers calls, is installed beside its Python.
            "PATH": os.pathsep.join([programs, variables.get("PATH", os.defpath)]),
            # Servers of tools import them as well.
            "PYTHONPATH": os.pathsep.join(filter(None, [variables.get("PYTHONPATH"), modules])),
        }
