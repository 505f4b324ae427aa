"""Isolation by sandlock (Landlock and seccomp), for machines that allow no namespaces: slower to start, and without a
file system in memory, so that the number and the total size of a program's files are looked at, not limited.

Its supervisor is a process of its own, `sandlock_process.py`, which ends all that it started when it is told to or when
this process has ended.
"""

import json
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from async_rl.parts.sandbox.backend import PREFIX, PYTHON, Launch, own_uid
from async_rl.parts.sandbox.limits import Limits
from async_rl.parts.sandbox.seccomp import filter_program

PROCESS = Path(__file__).parent / "sandlock_process.py"

READABLE = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/dev/null", "/dev/urandom")


def has_sandlock() -> bool:
    return find_spec("sandlock") is not None


@dataclass(frozen=True, slots=True)
class Sandlock:
    name: str = "sandlock"

    @contextmanager
    def launch(self, limits: Limits) -> Iterator[Launch]:
        scratch = f"{tempfile.gettempdir()}/async-rl-sandbox-{secrets.token_hex(8)}"
        policy = {
            "scratch": scratch,
            "readable": [path for path in (*READABLE, str(PREFIX)) if Path(path).exists()],
            "writable": ["/dev/null"],
            "num_processes": limits.num_processes,
            "uid": own_uid() if os.geteuid() == 0 else None,
        }
        command = (sys.executable, "-P", str(PROCESS), json.dumps(policy))
        yield Launch(
            command,
            str(PYTHON),
            scratch,
            in_memory=False,
            ends_by=signal.SIGTERM,
            filter=filter_program(keeps_metadata=True),
            counts_processes=True,
        )
