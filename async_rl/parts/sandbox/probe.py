"""Which backend isolates on this machine: each is tried with a program that attacks what it must protect."""

import contextlib
import itertools
import json
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from async_rl.errors import ConfigError, SandboxFailed
from async_rl.parts.sandbox.backend import Backend
from async_rl.parts.sandbox.bubblewrap import Bubblewrap, find_bubblewraps
from async_rl.parts.sandbox.limits import Limits, Program
from async_rl.parts.sandbox.sandbox import Sandbox
from async_rl.parts.sandbox.sandlock import Sandlock, has_sandlock
from async_rl.parts.sandbox.seccomp import has_filter

LIMITS = Limits(wall_s=20.0, num_processes=8)

ATTACKS = """
import json, os, socket
facts = json.loads(input())

def succeeds(attack, *arguments):
    try:
        attack(*arguments)
    except (OSError, ValueError):
        return False
    return True

def connect(family, address):
    with socket.socket(family) as client:
        client.settimeout(2)
        client.connect(address)

def read(path):
    with open(path, "rb") as file:
        file.read(1)

def fork_many():
    for _ in range(facts["num_processes"]):
        if os.fork() == 0:
            os.close(ending)
            os.read(waiting, 1)
            os._exit(0)

waiting, ending = os.pipe()
found = {
    "reads a file of ours": succeeds(read, facts["secret"]),
    "reads /etc/passwd": succeeds(read, "/etc/passwd"),
    "reads the environment of its parent": succeeds(read, f"/proc/{os.getppid()}/environ") and os.getppid() > 1,
    "writes outside its own directory": succeeds(os.mkdir, facts["folder"]),
    "connects to a port of this machine": succeeds(connect, socket.AF_INET, tuple(facts["port"])),
    "connects to an abstract socket": succeeds(connect, socket.AF_UNIX, "\\0" + facts["abstract"]),
    "signals our process": succeeds(os.kill, facts["pid"], 0),
    "is root": 0 in os.getresuid() and succeeds(os.chown, ".", 1, 1),
    "starts any number of processes": succeeds(fork_many),
}
with open("own", "w") as file:
    file.write("it can write its own files")
print(json.dumps([name for name, failed in found.items() if failed]))
"""


async def open_sandbox() -> Sandbox:
    """The sandbox by the first backend that works here.

    Raises:
        ConfigError: none does; says what was tried, why it failed, and what to do.
    """
    faults: list[str] = []
    for backend in _candidates(faults):
        fault = await _fault_of(Sandbox(backend))
        if fault is None:
            return Sandbox(backend)
        faults.append(f"{backend.name}: {fault}")
    tried = "\n".join(f"- {fault}" for fault in faults)
    raise ConfigError(
        f"no sandbox works on this machine, and untrusted programs are not run without one. Tried:\n{tried}\n"
        "Install bubblewrap (`apt install bubblewrap`, or `pip install 'async-rl[sandbox]'`) and let it make "
        "namespaces: as root with CAP_SYS_ADMIN, else with user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
        "kernel.apparmor_restrict_unprivileged_userns=0); or run on Linux 6.12 or later with Landlock, for sandlock"
    )


def require_installed() -> None:
    """Checks that there is a program which may isolate here, without trying it.

    Raises:
        ConfigError: there is none.
    """
    if not find_bubblewraps() and not has_sandlock():
        raise ConfigError(
            "untrusted programs need a sandbox: install bubblewrap (`apt install bubblewrap`), or 'async-rl[sandbox]'"
        )


def _candidates(faults: list[str]) -> Iterator[Backend]:
    if not has_filter():
        faults.append(f"none: there is no filter of system calls for {os.uname().machine}")
        return
    if not (paths := find_bubblewraps()):
        faults.append("bubblewrap: not installed")
    else:
        for path, as_root in itertools.product(paths, (True, False) if os.geteuid() == 0 else (False,)):
            yield Bubblewrap(path, as_root)
    if has_sandlock():
        yield Sandlock()
    else:
        faults.append("sandlock: not installed")


async def _fault_of(sandbox: Sandbox) -> str | None:
    """Why it must not be used; None if it isolates."""
    with _targets() as facts:
        facts["num_processes"] = LIMITS.num_processes
        try:
            outcome = await sandbox.run(Program(ATTACKS, stdin=json.dumps(facts).encode()), LIMITS)
        except (SandboxFailed, OSError) as error:
            return str(error)
    try:
        reached = json.loads(outcome.stdout)
    except ValueError:
        return f"a program ended with {outcome.status}: {outcome.stderr.decode(errors='replace')[-1000:].strip()}"
    return f"a program inside {', '.join(reached)}" if reached else None


@contextlib.contextmanager
def _targets() -> Iterator[dict[str, object]]:
    """What the probe attacks: a file, a folder, a port and an abstract socket of this process."""
    folder = Path(tempfile.mkdtemp(prefix="async-rl-probe-"))
    abstract = f"async-rl-probe-{secrets.token_hex(8)}"
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        folder.chmod(0o777)
        (folder / "secret").touch(0o644)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(f"\0{abstract}")
        unix.listen()
        yield {
            "secret": str(folder / "secret"),
            "folder": str(folder / "made"),
            "port": tcp.getsockname(),
            "abstract": abstract,
            "pid": os.getpid(),
        }
