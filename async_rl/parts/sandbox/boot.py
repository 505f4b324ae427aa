"""Brings the code of `inside/` into a new interpreter, compiled: it is the same Python."""

import marshal
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

_INSIDE = Path(__file__).parent / "inside"
_PACKAGE = "async_rl.parts.sandbox.inside"

READY = b"\0"

SOURCE = """
import marshal, os, sys
connection = os.dup(0)
nothing = os.open(os.devnull, os.O_RDONLY)
os.dup2(nothing, 0)
os.close(nothing)
os.write(connection, b"\\0")
def read(size):
    data = b""
    while len(data) < size:
        part = os.read(connection, size - len(data))
        if not part:
            os._exit(0)
        data += part
    return data
request = marshal.loads(read(int.from_bytes(read(4), "big")))
for name, code in request.pop("modules"):
    module = sys.modules[name] = type(sys)(name)
    exec(code, vars(module))
module.main(connection, request)
"""
"""The program given to the interpreter, whose standard input is the connection: sandlock closes all else.

It reports that it runs, and so that it will die with its parent, before it is told what to run: nothing untrusted
outlives a parent that is killed in between.
"""


def request(kind: str, **fields: Any) -> bytes:
    """The first message to an interpreter, which runs `inside/KIND.py` with `fields`."""
    modules = [(f"{_PACKAGE}.{name}", _compiled(name)) for name in ("confinement", *_NEEDS.get(kind, ()), kind)]
    return marshal.dumps({**fields, "modules": modules})


_NEEDS = {"calls": ("plain_data",), "checker": ("plain_data",)}
"""Further modules that one of them imports."""


@cache
def _compiled(name: str) -> CodeType:
    full_name = f"{_PACKAGE}.{name}"
    code = SourceFileLoader(full_name, str(_INSIDE / f"{name}.py")).get_code(full_name)
    assert code is not None, "a file of source has code"
    return code
