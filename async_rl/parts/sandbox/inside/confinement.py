"""The first steps inside: an own user, limits that cannot be raised again, the program's files, and messages."""

from __future__ import annotations

import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

MEMORY_EXIT = 251
"""The exit code of a program that ended with a MemoryError."""


def confine(request: dict[str, Any]) -> None:
    """Gives up every privilege, and sets the limits of this process and all its descendants."""
    uid = request["uid"]
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    for name, soft, hard in request["rlimits"]:
        kind = getattr(resource, name)
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))
    if request["filter"] is not None:
        _install(request["filter"])
    scratch = os.getcwd()
    os.environ.clear()
    os.environ.update({"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": scratch, "TMPDIR": scratch, "LANG": "C.UTF-8"})
    sys.path.insert(0, scratch)
    for name, content in request["files"].items():
        if "/" in name:
            os.makedirs(os.path.dirname(name), exist_ok=True)
        with open(name, "wb") as file:
            file.write(content)


def _install(filters: bytes) -> None:
    """Installs a seccomp filter, an array of `struct sock_filter` of 8 bytes each."""
    import ctypes

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filters", ctypes.c_char_p))

    libc = ctypes.CDLL(None, use_errno=True)
    set_no_new_privs, set_seccomp, mode_filter = 38, 22, 2
    program = Program(len(filters) // 8, filters)
    libc.prctl(set_no_new_privs, 1, 0, 0, 0)
    if libc.prctl(set_seccomp, mode_filter, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "a filter of system calls cannot be installed")


def receive(connection: int) -> bytes:
    """One message; EOFError at the connection's end."""
    return _read(connection, int.from_bytes(_read(connection, 4), "big"))


def send(connection: int, message: bytes) -> None:
    data = memoryview(len(message).to_bytes(4, "big") + message)
    while data:
        data = data[os.write(connection, data) :]


def _read(connection: int, num_bytes: int) -> bytes:
    parts = []
    while num_bytes:
        part = os.read(connection, min(num_bytes, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def as_stdin(content: bytes) -> None:
    """Makes `content` the standard input, from its start to its end."""
    name = ".stdin"
    with open(name, "wb") as file:
        file.write(content)
    source = os.open(name, os.O_RDONLY)
    os.unlink(name)
    os.dup2(source, 0)
    os.close(source)


def run_as_main(program: str | CodeType, path: str) -> int:
    """Runs a Python program, or its code, in this interpreter as `python path` would; its exit code."""
    names = vars(sys.modules["__main__"])
    names.clear()
    names.update(__name__="__main__", __builtins__=__builtins__, __file__=path)
    sys.argv = [path]
    code = 0
    try:
        exec(compile(program, path, "exec") if isinstance(program, str) else program, names)
    except SystemExit as error:
        code = _exit_code(error.code)
    except BaseException as error:
        trace = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = MEMORY_EXIT if isinstance(error, MemoryError) else 1
    return code


def _exit_code(said: object) -> int:
    if said is None or isinstance(said, int):
        return (said or 0) & 0xFF
    print(said, file=sys.stderr)
    return 1
