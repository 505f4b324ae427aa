"""Rollout programs named `command:PROGRAM ARGUMENTS`: any agent, as a process for each rollout.

The process reaches the policy at the gateway, through the variables that OpenAI's clients read. Its prompt is JSON on
its standard input; its last line on standard output may be JSON with its reward. It runs under a process guard, so
that nothing of it outlives its rollout, or the trainer.
"""

import asyncio
import json
import os
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from async_rl.config.rollout_section import RolloutSection
from async_rl.rollouts.agents.program import SETTING, ProgramFailed, ProgramPrompt, RolloutResult
from async_rl.rollouts.agents.session import RolloutSession
from async_rl.shared.json_values import as_json
from async_rl.shared.programs.agent_process import agent_environment, start_guarded
from async_rl.shared.programs.user_command import split_command

PROMPT_VARIABLE = "ASYNC_RL_PROMPT"
"""Names the file with the prompt, for agents whose standard input is not at hand."""

LIMIT_GRACE_S = 2.0
"""After its time limit an agent gets no further turns for so long, and may end in its own way."""

KILL_GRACE_S = 1.0
"""Between SIGTERM and SIGKILL."""

GUARD_GRACE_S = 5.0
"""How long the guard may take to end what is left, beyond `KILL_GRACE_S`."""

MAX_LINE_BYTES = 2**20
"""Of the line with the reward."""

MAX_SHOWN_BYTES = 4096
"""Of standard error, in the report of a failure."""

READ_BYTES = 2**16

Ended = tuple[int, bytes, bytes]
"""Exit code, and the ends of standard output and standard error."""


class CommandProgram:
    """Implements `Program`; its prompts have the base URL of their rollout."""

    def __init__(self, config: RolloutSection) -> None:
        """
        Raises:
            ConfigError: there is no such program.
        """
        self._timeout_s = config.options.timeout_s
        self._command = split_command(SETTING, config.program)

    async def start(self) -> None:
        """Nothing: each rollout starts a process of its own."""

    async def close(self) -> None:
        """Nothing: each rollout ends its process."""

    async def run(self, prompt: ProgramPrompt, session: RolloutSession) -> RolloutResult:
        async with (
            _prompt_file(prompt) as file,
            _guarded(self._command, file, _environment(prompt, file)) as ended,
        ):
            await self._wait(ended, session)
        if not ended.done():
            raise ProgramFailed(": its process, or one that it started, cannot be ended")
        code, output, errors = ended.result()
        if code != 0 and session.limit is None:
            raise ProgramFailed(f": exit code {code}; its standard error ends with:\n{_text(errors)}")
        return result_of(output)

    async def _wait(self, ended: "asyncio.Task[Ended]", session: RolloutSession) -> None:
        """Returns when the process has ended, or has to be.

        Raises:
            AsyncRLError: the pool failed.
        """
        wanted: list[asyncio.Future[Any]] = [ended, session.failed]
        await asyncio.wait(wanted, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if session.failed.done():
            raise session.failed.result()
        if not ended.done():
            session.stop("time")
            await asyncio.wait([ended], timeout=LIMIT_GRACE_S)


@asynccontextmanager
async def _prompt_file(prompt: ProgramPrompt) -> AsyncIterator[Path]:
    """
    Raises:
        ProgramFailed: there is no room for it.
    """
    shown = {"prompt_id": prompt.prompt_id, "row": prompt.row, "messages": prompt.messages, "seed": prompt.seed}
    # Rows of Parquet files may hold dates and the like.
    text = json.dumps(as_json(shown))
    with ExitStack() as stack:
        try:
            descriptor, name = tempfile.mkstemp(prefix="async-rl-prompt-", suffix=".json")
            stack.callback(Path(name).unlink, missing_ok=True)
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
        except OSError as error:
            raise _not_started(error) from error
        yield Path(name)


@asynccontextmanager
async def _guarded(
    command: list[str], file: Path, environment: Mapping[str, str]
) -> AsyncIterator["asyncio.Task[Ended]"]:
    """The command under its guard, which ends it when this context does; yields its end, which is done by then.

    If it is not, the process cannot be ended.
    """
    try:
        process = await start_guarded(command, environment, KILL_GRACE_S, str(file), PIPE)
    except OSError as error:
        raise _not_started(error) from error
    ended = asyncio.create_task(_end_of(process))
    try:
        yield ended
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.wait([ended], timeout=KILL_GRACE_S + GUARD_GRACE_S)
        if not ended.done():
            process.kill()
            ended.cancel()


def _not_started(error: OSError) -> ProgramFailed:
    return ProgramFailed(
        f": its process cannot be started: {error}; lower rollout.options.max_concurrent, or raise the limits of open "
        "files and processes (ulimit -n, -u)"
    )


def _environment(prompt: ProgramPrompt, file: Path) -> dict[str, str]:
    return {
        **agent_environment(urlsplit(prompt.base_url).hostname or ""),
        "OPENAI_BASE_URL": prompt.base_url,
        "OPENAI_API_BASE": prompt.base_url,
        "OPENAI_API_KEY": prompt.api_key,
        PROMPT_VARIABLE: str(file),
    }


async def _end_of(process: Process) -> Ended:
    assert process.stdout is not None and process.stderr is not None
    output, errors = await asyncio.gather(_tail(process.stdout, MAX_LINE_BYTES), _tail(process.stderr, MAX_SHOWN_BYTES))
    return await process.wait(), output, errors


async def _tail(stream: asyncio.StreamReader, num_bytes: int) -> bytes:
    kept = bytearray()
    while part := await stream.read(READ_BYTES):
        kept += part
        if len(kept) > 2 * num_bytes:
            del kept[:-num_bytes]
    return bytes(kept[-num_bytes:])


def result_of(output: bytes) -> RolloutResult:
    """What the last line says; none where it is no JSON object with a reward.

    Raises:
        ProgramFailed: the reward is none.
    """
    lines = output.split(b"\n")
    last = next((line for line in reversed(lines) if line.strip()), b"")
    try:
        said = json.loads(last)
    except (ValueError, RecursionError):
        return RolloutResult()
    if not isinstance(said, dict) or "reward" not in said:
        return RolloutResult()
    try:
        return RolloutResult.of(SimpleNamespace(reward=said["reward"], turn_rewards=said.get("turn_rewards")))
    except (TypeError, ValueError) as error:
        raise ProgramFailed(f": its last line is {_text(last)!r:.300}: {error}") from error


def _text(content: bytes) -> str:
    return content.decode(errors="replace").strip()
