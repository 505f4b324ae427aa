"""An interpreter for `inference.python` whose instances have an engine that dies when it is told to.

`mortal_python` writes it: a program that takes `-m inference_service ...` as Python does. The engine that takes a step
next after `kill_an_engine` fails in it, one engine each time.
"""

import sys
from pathlib import Path

PROGRAM = """#!{python}
import os
import sys

sys.path.insert(0, {root!r})
assert sys.argv[1:3] == ["-m", "inference_service"], sys.argv
sys.argv[1:3] = []

from inference_service import __main__ as program

import_server = program._import_server


def import_mortal(options):
    server = import_server(options)
    from inference_service.engine.batching import Batching

    one_step = Batching._one_step

    def step(self):
        try:
            os.unlink({told!r})
        except FileNotFoundError:
            return one_step(self)
        raise MemoryError("told to die")

    Batching._one_step = step
    return server


program._import_server = import_mortal
code = program.main()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
"""


def mortal_python(folder: Path) -> Path:
    path = folder / "mortal_python"
    root = str(Path(__file__).parents[2])
    path.write_text(PROGRAM.format(python=sys.executable, root=root, told=str(_told(folder))))
    path.chmod(0o755)
    return path


def kill_an_engine(folder: Path) -> None:
    """Of those that were started with the interpreter in this folder."""
    _told(folder).touch()


def _told(folder: Path) -> Path:
    return folder / "engine_dies"
