"""Which backend is taken, and that none is where none isolates."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from async_rl.errors import ConfigError
from async_rl.parts.sandbox import Program, open_sandbox, probe
from async_rl.parts.sandbox.backend import PYTHON, Backend, Launch
from async_rl.parts.sandbox.limits import Limits

REMEDY = r"(?s)no sandbox works on this machine.*Tried:\n- {}.*Install bubblewrap .*Landlock"


@dataclass(frozen=True)
class Bare:
    """Isolates nothing: the probe's attacks are harmless."""

    command: tuple[str, ...] = ()
    name: str = "bare"

    @contextmanager
    def launch(self, limits: Limits) -> Iterator[Launch]:
        yield Launch(self.command, str(PYTHON), "/none", in_memory=False)


def take(monkeypatch: pytest.MonkeyPatch, *backends: Backend) -> None:
    monkeypatch.setattr(probe, "_candidates", lambda faults: iter(backends))


@pytest.mark.distributed
def test_what_isolates_nothing_is_refused_with_what_was_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    take(monkeypatch, Bare())
    reached = (
        "bare: a program inside reads a file of ours, .*connects to a port of this machine, .*, signals our process"
    )
    with pytest.raises(ConfigError, match=REMEDY.format(reached)):
        asyncio.run(open_sandbox())


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("false",), r"an isolated interpreter did not start \(exit code 1\)"),
        (("sh", "-c", "echo No permissions to create new namespace >&2; exit 1"), ".*No permissions to create"),
        (("/no/such/program",), ".*No such file"),
    ],
)
def test_what_does_not_start_is_refused_with_what_it_says(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], why: str
) -> None:
    take(monkeypatch, Bare(command))
    with pytest.raises(ConfigError, match=REMEDY.format(f"bare: {why}")):
        asyncio.run(open_sandbox())


@pytest.mark.distributed
def test_the_first_backend_that_isolates_is_taken() -> None:
    sandbox = asyncio.run(open_sandbox())
    assert sandbox.backend.name == "bubblewrap"
    assert asyncio.run(sandbox.run(Program("print(1)"))).stdout == b"1\n"


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "find_bubblewraps", list)
    monkeypatch.setattr(probe, "has_sandlock", lambda: False)
    with pytest.raises(ConfigError, match=REMEDY.format("bubblewrap: not installed\n- sandlock: not installed")):
        asyncio.run(open_sandbox())
    with pytest.raises(ConfigError, match=r"install bubblewrap .*'async-rl\[sandbox\]'"):
        probe.require_installed()


def test_a_machine_whose_system_calls_are_not_known_has_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match="no filter of system calls for"):
        asyncio.run(open_sandbox())


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x"])
def test_a_file_outside_the_working_directory_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="below its working directory"):
        Program("", files={name: b""})


def test_a_program_is_either_python_or_a_command() -> None:
    with pytest.raises(ValueError, match="either source or argv"):
        Program()
    with pytest.raises(ValueError, match="either source or argv"):
        Program("pass", argv=("true",))
