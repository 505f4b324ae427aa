"""Runs short untrusted programs isolated; used by rewards and by tools of agents."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from async_rl.parts.sandbox.backend import Backend
from async_rl.parts.sandbox.inside.confinement import MEMORY_EXIT
from async_rl.parts.sandbox.limits import Limits, Outcome, Program, Status
from async_rl.parts.sandbox.process import SandboxProcess

OUT_OF_CPU = 128 + 24
"""Ended by SIGXCPU."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Starts isolated processes by a backend that was tried on this machine: `open_sandbox` makes one.

    It may be used by any number of coroutines at once, and on several event loops.
    """

    backend: Backend

    async def run(self, program: Program, limits: Limits = Limits()) -> Outcome:  # noqa: B008
        """Runs a program to its end or to the first limit that it exceeds; a cancelled call ends it.

        Raises:
            SandboxFailed: the sandbox itself failed.
        """
        fields = {"source": program.source, "argv": list(program.argv), "stdin": program.stdin}
        async with self.process(limits, "program", files=dict(program.files), **fields) as process:
            began = time.monotonic()
            code: int | None = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limits.wall_s):
                    code = await process.wait()
            seconds = time.monotonic() - began
        status = process.exceeded or _status(code)
        exit_code = None if process.exceeded else code
        return Outcome(status, exit_code, process.stdout, process.stderr, seconds)

    @contextlib.asynccontextmanager
    async def process(self, limits: Limits, kind: str, **fields: Any) -> AsyncIterator[SandboxProcess]:
        """An isolated interpreter that runs `inside/KIND.py`; at the end of the block nothing of it is left."""
        process = await SandboxProcess.start(self.backend, limits, kind, **{"files": {}, **fields})
        try:
            yield process
        finally:
            await process.end()


def _status(code: int | None) -> Status:
    if code is None or code == OUT_OF_CPU:
        return "timeout"
    if code == MEMORY_EXIT:
        return "memory"
    return "error" if code else "ok"
