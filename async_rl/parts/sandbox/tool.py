"""The Python tool of agents: an isolated interpreter that keeps its state over the calls of one rollout."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

from async_rl.parts.sandbox.limits import Limits
from async_rl.parts.sandbox.process import SandboxProcess
from async_rl.parts.sandbox.sandbox import Sandbox

INTERRUPT_GRACE_S = 1.0
"""How long a call that was interrupted may take to end; after that its interpreter is ended, with its state."""

LOST = "\n[the interpreter was ended: {why}; its state is lost]"


class PythonTool:
    """One call at a time; `open_python_tool` makes it, and ends it."""

    def __init__(self, sandbox: Sandbox, limits: Limits) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._stack = contextlib.AsyncExitStack()
        self._process: SandboxProcess | None = None
        self._ended = False
        self._one_call = asyncio.Lock()

    async def call(self, code: str) -> str:
        """Runs code; returns what it printed and the value of its last line, or its traceback.

        An exception keeps the state, and so does a call that is interrupted after `limits.wall_s`; an interpreter
        that ends, or has to be ended, does not: the text says so, and the next call begins anew.

        Raises:
            SandboxFailed: the sandbox itself failed.
            RuntimeError: its block has ended.
        """
        async with self._one_call:
            if self._ended:
                raise RuntimeError("the Python tool has ended with its block: open another one with open_python_tool")
            try:
                process = self._process or await self._start()
                return await self._ask(process, code)
            except BaseException:
                await self._close()
                raise

    async def end(self) -> None:
        """Ends the interpreter; there will be no other one."""
        self._ended = True
        await self._close()

    async def _close(self) -> None:
        self._process = None
        await self._stack.aclose()

    async def _start(self) -> SandboxProcess:
        # An interpreter may be used for hours: its calls are limited one by one.
        limits = replace(self._limits, cpu_s=10**6)
        fields = {"call_s": self._limits.wall_s, "answer_bytes": self._limits.output_bytes}
        started = self._sandbox.process(limits, "tool", **fields)
        self._process = await self._stack.enter_async_context(started)
        return self._process

    async def _ask(self, process: SandboxProcess, code: str) -> str:
        # The answer says how much more was printed.
        most = self._limits.output_bytes + 100
        why, said = "", b""
        try:
            async with asyncio.timeout(self._limits.wall_s + INTERRUPT_GRACE_S):
                await process.send(code.encode(errors="replace"))
                said = await process.receive(most)
        except TimeoutError:
            why = f"a call took longer than {self._limits.wall_s:g} s and could not be interrupted"
        except EOFError:
            why = "too much memory" if process.exceeded == "memory" else "it exited"
        if why:
            await self._close()
            return (process.stdout + process.stderr).decode(errors="replace") + LOST.format(why=why)
        return said.decode(errors="replace")


@contextlib.asynccontextmanager
async def open_python_tool(sandbox: Sandbox, limits: Limits = Limits()) -> AsyncIterator[PythonTool]:  # noqa: B008
    """A Python tool, of which nothing is left after the block; `limits.wall_s` is the time of one call.

    Its interpreter starts with the first call: an agent that does not use it costs nothing.
    """
    tool = PythonTool(sandbox, limits)
    try:
        yield tool
    finally:
        await tool.end()
