"""What a program may use, and how it ended."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

MiB = 2**20


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that one sandbox may use; whatever exceeds it is ended with all its processes.

    Attributes:
        wall_s: from when the sandbox is ready until its program ends.
        cpu_s: of each process.
        memory_bytes: address space of each process; memory and files of all processes together.
        num_processes: processes and threads at once.
        output_bytes: of standard output, and of standard error.
        file_bytes: of one file, and of all files together.
        num_files: files and directories.
    """

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes: int = 512 * MiB
    num_processes: int = 32
    output_bytes: int = MiB
    file_bytes: int = 64 * MiB
    num_files: int = 10_000

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"the limit {name} is {value!r}: expected a number above 0")


@dataclass(frozen=True, slots=True)
class Program:
    """A Python program (`source`) or a command of the system (`argv`), with the files of its working directory."""

    source: str | None = None
    argv: tuple[str, ...] = ()
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.source is None) != bool(self.argv):
            raise ValueError("a program needs either source or argv")
        for name in self.files:
            if name.startswith("/") or ".." in name.split("/"):
                raise ValueError(f"file {name!r} of a program: expected a path below its working directory")


Status = Literal["ok", "error", "timeout", "memory", "output"]
"""Ended by itself with exit code 0, or another one; ended because it exceeded its time, its memory or its output."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended. A signal N that ended it is exit code 128 + N; None where the sandbox ended it."""

    status: Status
    exit_code: int | None
    stdout: bytes
    stderr: bytes
    seconds: float
