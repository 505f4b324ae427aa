"""The supervisor of one program isolated by sandlock: `python sandlock_process.py POLICY COMMAND...`.

It ends with the program's exit code, after it has ended everything the program started and removed its directory: also
when it is told to end (SIGTERM), and when its parent ends.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import threading
from types import FrameType
from typing import Any

import sandlock

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36


class _Ended(Exception):
    """Told to end."""


def main(policy: dict[str, Any], command: list[str]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getppid()
    if policy["uid"] is not None:
        os.setgroups([])
        os.setresgid(*[policy["uid"]] * 3)
        os.setresuid(*[policy["uid"]] * 3)
    # After the change of user, which would undo it; whoever leaves its parent becomes a child of this process.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    # Its own entries in /proc, which the supervisor reads, would still be root's.
    libc.prctl(PR_SET_DUMPABLE, 1)
    if os.getppid() != parent:
        return 1
    codes: list[int] = []
    scratch = policy["scratch"]
    try:
        signal.signal(signal.SIGTERM, _end)
        os.mkdir(scratch, 0o700)
        sandbox = sandlock.Sandbox(
            fs_readable=policy["readable"],
            fs_writable=[scratch, *policy["writable"]],
            max_processes=policy["num_processes"],
            clean_env=True,
            env=dict(os.environ),
            cwd=scratch,
        )
        process = sandbox.popen(command)
        # Not in the main thread: a signal is handled between two lines of Python only.
        waiter = threading.Thread(target=lambda: codes.append(_exit_code(process.wait())), daemon=True)
        waiter.start()
        waiter.join()
        return codes[0]
    except _Ended:
        return 128 + signal.SIGTERM
    finally:
        _end_children()
        _remove(scratch)


def _remove(scratch: str) -> None:
    """A program may have made directories that nobody may read."""
    for folder, names, _ in os.walk(scratch):
        for path in (os.path.join(folder, name) for name in names):
            if not os.path.islink(path):
                os.chmod(path, 0o700)
    shutil.rmtree(scratch, ignore_errors=True)


def _exit_code(result: Any) -> int:
    return int(128 + result.signal if result.signal > 0 else result.exit_code)


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Ended


def _end_children() -> None:
    """Ends all descendants: with its parent gone, each becomes a child of this process in turn."""
    while children := _children():
        for child in children:
            # The other thread may have waited for it meanwhile.
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _children() -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue
            if parent == os.getpid():
                found.append(int(name))
    return found


if __name__ == "__main__":
    # Without a wait for the thread.
    os._exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
