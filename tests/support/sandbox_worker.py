"""Runs hostile programs as whoever starts it: `python -m tests.support.sandbox_worker bubblewrap|sandlock`.

Prints, as JSON, how each ended and what is left of it. While they run, it runs a harmless program again and again.
"""

import asyncio
import ctypes
import json
import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from async_rl.parts.sandbox import Limits, Program, Sandbox
from async_rl.parts.sandbox.backend import Backend
from async_rl.parts.sandbox.bubblewrap import Bubblewrap, find_bubblewraps
from async_rl.parts.sandbox.sandlock import Sandlock
from tests.support.hostile_programs import BREAKING, DAEMON, PRELUDE, REACHING

LIMITS = Limits(wall_s=1.5, cpu_s=10.0, memory_bytes=160 * 2**20, num_processes=32, num_files=2000)
"""For what may end by its time."""

PATIENT = replace(LIMITS, wall_s=60.0, cpu_s=60.0)
"""For what ends otherwise, also on a machine whose cores others use."""

AT_ONCE = 6

SOON_S = 20.0
"""For what takes milliseconds, on a machine whose cores others use."""

CALLER = """
import asyncio, sys
from async_rl.parts.sandbox import Limits, Program, Sandbox
from tests.support.sandbox_worker import backend_named
source, mark, backend = sys.argv[1:]
asyncio.run(Sandbox(backend_named(backend)).run(Program(source, stdin=mark.encode()), Limits(wall_s=100)))
"""


def limits_of(name: str) -> Limits:
    _, statuses = BREAKING.get(name, ("", {"ok"}))
    return LIMITS if "timeout" in statuses else PATIENT


def backend_named(name: str) -> Backend:
    return Sandlock() if name == "sandlock" else Bubblewrap(find_bubblewraps()[0], as_root=os.geteuid() == 0)


@contextmanager
def attacked() -> Iterator[dict[str, Any]]:
    """What the programs attack: secrets in memory, environment and files of this process, and its sockets."""
    with tempfile.TemporaryDirectory(prefix="attacked-") as name, socket.create_server(("127.0.0.1", 0)) as tcp:
        folder = Path(name)
        # Whatever is readable by everybody on this machine, is not inside.
        folder.chmod(0o777)
        (folder / "secret").write_text("secret")
        (folder / "secret").chmod(0o666)
        os.environ["TOKEN"] = "secret"
        abstract = f"attacked-{secrets.token_hex(8)}"
        with socket.socket(socket.AF_UNIX) as unix, socket.socket(socket.AF_UNIX) as hidden:
            unix.bind(str(folder / "socket"))
            hidden.bind(f"\0{abstract}")
            for each in (unix, hidden):
                each.listen()
            (folder / "socket").chmod(0o777)
            word = ctypes.create_string_buffer(b"secret")
            yield {
                "pid": os.getpid(),
                "uid": os.getuid(),
                "folder": name,
                "secrets": [str(folder / "secret"), str(Path(__file__)), str(Path.home() / ".netrc")],
                "port": tcp.getsockname()[1],
                "socket": str(folder / "socket"),
                "abstract": abstract,
                "address": ctypes.addressof(word),
                "mark": f"left-{secrets.token_hex(8)}",
            }


def processes_with(mark: str) -> list[int]:
    """The processes whose command line has this text, apart from this one."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and int(process.name) != os.getpid():
            try:
                if mark.encode() in (process / "cmdline").read_bytes():
                    found.append(int(process.name))
            except OSError:
                continue
    return found


async def left_of_cancelled(sandbox: Sandbox) -> list[int]:
    """The processes of a program whose call was cancelled, as soon as the call has ended."""
    mark = f"cancelled-{secrets.token_hex(8)}"
    call = asyncio.create_task(sandbox.run(Program(DAEMON, stdin=mark.encode()), Limits(wall_s=100)))
    while not processes_with(mark):
        await asyncio.sleep(0.05)
    call.cancel()
    await asyncio.wait([call])
    return processes_with(mark)


async def left_of_killed(backend: Backend) -> list[int]:
    """The processes of a program whose caller was killed, a moment later."""
    mark = f"killed-{secrets.token_hex(8)}"
    caller = await asyncio.create_subprocess_exec(sys.executable, "-c", CALLER, DAEMON, mark, backend.name)
    # Of the caller itself, too.
    while len(processes_with(mark)) < 2:
        await asyncio.sleep(0.05)
    caller.kill()
    await caller.wait()
    until = time.monotonic() + SOON_S
    while processes_with(mark) and time.monotonic() < until:
        await asyncio.sleep(0.05)
    return processes_with(mark)


async def attack(sandbox: Sandbox, facts: dict[str, Any], source: str, limits: Limits = PATIENT) -> dict[str, Any]:
    began = time.monotonic()
    outcome = await sandbox.run(Program(PRELUDE + source, stdin=json.dumps(facts).encode()), limits)
    return {
        "status": outcome.status,
        "exit_code": outcome.exit_code,
        "stdout": outcome.stdout.decode("latin-1")[:300_000],
        "stderr": outcome.stderr.decode("latin-1")[-2000:],
        "seconds": time.monotonic() - began,
    }


async def main(backend: Backend) -> None:
    sandbox = Sandbox(backend)
    ended: dict[str, dict[str, Any]] = {}
    harmless: list[dict[str, Any]] = []
    sources = {**REACHING, **{name: program for name, (program, _) in BREAKING.items()}}
    with attacked() as facts:
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(name: str, source: str) -> None:
            async with turns:
                ended[name] = await attack(sandbox, facts, source, limits_of(name))

        async def others() -> None:
            while True:
                harmless.append(await attack(sandbox, facts, "print(os.listdir('.'), len(reached))"))
                await asyncio.sleep(0.2)

        beside = asyncio.create_task(others())
        await asyncio.gather(*(one(*each) for each in sources.items()))
        beside.cancel()
        await asyncio.wait([beside])
        left = processes_with(facts["mark"])
        files = sorted(path.name for path in Path(facts["folder"]).iterdir())
    left_of = {"cancelled": await left_of_cancelled(sandbox), "killed": await left_of_killed(backend)}
    print(json.dumps({"ended": ended, "harmless": harmless, "left": left, "left_of": left_of, "files": files}))


if __name__ == "__main__":
    asyncio.run(main(backend_named(sys.argv[1])))
