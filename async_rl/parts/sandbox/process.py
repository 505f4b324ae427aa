"""One isolated interpreter from its start to its end: messages, output, memory watched, nothing left behind."""

import asyncio
import contextlib
import math
import os
import signal
import socket
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

from async_rl.errors import SandboxFailed
from async_rl.parts.sandbox.backend import FLAGS, Backend, Launch
from async_rl.parts.sandbox.boot import READY, SOURCE, request
from async_rl.parts.sandbox.limits import Limits, Status
from async_rl.parts.sandbox.usage import usage_of

START_TIMEOUT_S = 60.0
"""An interpreter starts within milliseconds; on a machine that swaps, or with hundreds starting, it takes seconds."""

END_TIMEOUT_S = 10.0
"""How long the system may take to end killed processes."""

WATCH_S = 0.1
"""Between looks at the memory in use: what is written meanwhile is far below a machine's memory."""

MAX_OPEN_FILES = 128
"""Of each process: pipes and sockets have buffers. As many sockets of a user may be on their way in other sockets."""

MAX_SIGNALS = 1024
"""That wait for the processes of a user, or that its timers keep."""


class SandboxProcess:
    """Use `start`, then `end` in every case; `exceeded` names the limit that ended it."""

    def __init__(self, process: Process, connection: socket.socket, launch: Launch, limits: Limits) -> None:
        self.exceeded: Status | None = None
        self._process = process
        # Of exactly this process: `Process.kill` may reap it and so lose its exit code.
        self._pidfd = _pidfd_of(process)
        self._connection = connection
        self._launch = launch
        self._limits = limits
        self._outputs = [bytearray(), bytearray()]
        pipes = (process.stdout, process.stderr)
        self._readers = [asyncio.create_task(self._collect(*each)) for each in zip(pipes, self._outputs, strict=True)]
        self._watcher: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._all_ended = asyncio.Event()
        self._all_ended.set()

    @classmethod
    async def start(cls, backend: Backend, limits: Limits, kind: str, **fields: Any) -> "SandboxProcess":
        """Starts `inside/KIND.py` and gives it `fields`; its time counts from the return.

        Raises:
            SandboxFailed: the isolated interpreter did not start.
        """
        # Milliseconds, which are not cancelled: asyncio might never return, and bubblewrap would leave behind the child
        # that it has just made.
        starting = asyncio.create_task(cls._spawn(backend, limits))
        try:
            started = await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.create_task(_end_after(starting)))
            raise
        try:
            await started.send(request(kind, **_confinement(started._launch, limits), **fields))
        except BaseException:
            await started.end()
            raise
        return started

    @classmethod
    async def _spawn(cls, backend: Backend, limits: Limits) -> "SandboxProcess":
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.enter_context(ours)
            ours.setblocking(False)
            with backend.launch(limits) as launch:
                process = await asyncio.create_subprocess_exec(
                    *(*launch.command, launch.python, *FLAGS, "-c", SOURCE),
                    stdin=theirs.fileno(),
                    stdout=PIPE,
                    stderr=PIPE,
                    pass_fds=launch.fds,
                    # Nothing of ours; and a set has one order, so that the same program gives the same reward.
                    env={"PYTHONHASHSEED": "0"},
                    # Ctrl-C is sent to the whole process group.
                    start_new_session=True,
                    cwd="/",
                )
            on_failure.pop_all()
        started = cls(process, ours, launch, limits)
        await started._wait_until_ready()
        return started

    @property
    def stdout(self) -> bytes:
        """What it has printed; all of it after `end`."""
        return bytes(self._outputs[0])

    @property
    def stderr(self) -> bytes:
        return bytes(self._outputs[1])

    async def send(self, message: bytes) -> None:
        """Sends it a message, which is dropped if it has ended."""
        with contextlib.suppress(ConnectionError):
            length = len(message).to_bytes(4, "big")
            await asyncio.get_running_loop().sock_sendall(self._connection, length + message)

    async def receive(self, max_bytes: int) -> bytes:
        """Its next message, which may be anything.

        Raises:
            EOFError: it has ended, or announced a longer message, and is ended.
        """
        size = int.from_bytes(await self._receive(4), "big")
        if size > max_bytes:
            self._exceed("output")
            raise EOFError
        return await self._receive(size)

    async def wait(self) -> int:
        """Its exit code, 128 + N for signal N, as soon as it and all that it started have ended."""
        code = await self._process.wait()
        await self._all_ended.wait()
        await asyncio.wait(self._readers)
        return code if code >= 0 else 128 - code

    async def end(self) -> None:
        """Kills it if it still runs, and waits until nothing of it is left.

        Raises:
            SandboxFailed: the system did not end it in time.
        """
        self._kill()
        self._ending = self._ending or asyncio.create_task(self._require_end())
        # Also by a caller that is cancelled: a few milliseconds.
        await asyncio.shield(self._ending)

    async def _require_end(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        self._connection.close()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await self.wait()
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None
            # asyncio does so a few turns of its loop later, which may have been closed by then.
            self._process._transport.close()  # type: ignore[attr-defined]
        except TimeoutError:
            raise SandboxFailed(
                f"a killed sandbox (process {self._process.pid}) has not ended after {END_TIMEOUT_S:g} s: it may wait "
                "for a file system that does not answer"
            ) from None

    async def _wait_until_ready(self) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                if await self._receive(1) == READY:
                    # Only now are the files that its processes see its own.
                    self._watcher = asyncio.create_task(self._watch())
                    self._wait_for_first_inside()
                    return
        except (TimeoutError, EOFError):
            pass
        await self.end()
        said = self.stderr.decode(errors="replace").strip() or f"it was silent for {START_TIMEOUT_S:g} s"
        raise SandboxFailed(f"an isolated interpreter did not start (exit code {self._process.returncode}): {said}")

    def _wait_for_first_inside(self) -> None:
        """Lets `wait` wait for the first process inside, too, which ends when all others of its namespace have ended.

        Without it a killed command returns earlier, with processes left that the system is about to end. Not every
        kernel lists the children of a process.
        """
        pid = self._process.pid
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            pidfd = os.pidfd_open(int(children[0])) if children else None
            if pidfd is not None:
                self._all_ended.clear()
                asyncio.get_running_loop().add_reader(pidfd, self._note_end, pidfd)

    def _note_end(self, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        self._all_ended.set()

    async def _receive(self, num_bytes: int) -> bytes:
        data = bytearray()
        loop = asyncio.get_running_loop()
        while len(data) < num_bytes:
            try:
                part = await loop.sock_recv(self._connection, min(num_bytes - len(data), 2**20))
            except OSError as error:
                raise EOFError from error
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    async def _collect(self, pipe: asyncio.StreamReader | None, output: bytearray) -> None:
        """Reads to the end, which comes when the last process that holds the pipe has ended."""
        assert pipe is not None
        while part := await pipe.read(2**16):
            room = self._limits.output_bytes - len(output)
            output += part[:room]
            if len(part) > room:
                self._exceed("output")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            launch, limits = self._launch, self._limits
            used = usage_of(self._process.pid, launch.scratch, limits.num_files, in_memory=launch.in_memory)
            if (
                used.memory_bytes > limits.memory_bytes
                or used.file_bytes > limits.file_bytes
                or used.num_files > limits.num_files
            ):
                self._exceed("memory")

    def _exceed(self, limit: Status) -> None:
        self.exceeded = self.exceeded or limit
        self._kill()

    def _kill(self) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, self._launch.ends_by)


async def _end_after(starting: "asyncio.Task[SandboxProcess]") -> None:
    with contextlib.suppress(SandboxFailed):
        await (await starting).end()


def _pidfd_of(process: Process) -> int | None:
    """A file descriptor of the process; None if it has ended already."""
    try:
        return os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None


def _confinement(launch: Launch, limits: Limits) -> dict[str, Any]:
    """What `inside/confinement.py` sets: a second of CPU after SIGXCPU the process is killed."""
    cpu = math.ceil(limits.cpu_s)
    rlimits = [
        ("RLIMIT_CPU", cpu, cpu + 1),
        ("RLIMIT_AS", limits.memory_bytes, limits.memory_bytes),
        ("RLIMIT_FSIZE", limits.file_bytes, limits.file_bytes),
        ("RLIMIT_NOFILE", MAX_OPEN_FILES, MAX_OPEN_FILES),
        ("RLIMIT_CORE", 0, 0),
        ("RLIMIT_MEMLOCK", 0, 0),
        ("RLIMIT_SIGPENDING", MAX_SIGNALS, MAX_SIGNALS),
    ]
    if not launch.counts_processes:
        rlimits.append(("RLIMIT_NPROC", limits.num_processes, limits.num_processes))
    return {"uid": launch.uid, "rlimits": rlimits, "filter": launch.filter}
