"""Compiles the emulated NPU, once per machine for each source and version of torch."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_name("emulated_npu.cpp")
NAME = "emulated_npu"
COMPILER = "g++"
FLAGS = (
    *("-std=c++20", "-O1", "-w", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={NAME}"),
    *("-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"),
)
LIBRARIES = ("-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10")


@cache
def lacking() -> str | None:
    """Why it cannot be built here; None if it can."""
    if shutil.which(COMPILER) is None:
        return f"the emulated NPU needs a C++ compiler, and there is no {COMPILER}"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "the emulated NPU needs Python's headers (Debian and Ubuntu: python3.11-dev)"
    return None


@cache
def library() -> Path:
    """The compiled module. The first call on a machine takes a minute or two; others wait for it meanwhile."""
    words = (SOURCE.read_text(), torch.__version__, sysconfig.get_config_var("SOABI"), *FLAGS)
    key = hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache_home / "async-rl-tests" / f"{NAME}-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{NAME}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            _compile(folder / "unfinished.so")
            (folder / "unfinished.so").rename(made)
    return made


def _compile(made: Path) -> None:
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    command = [
        *(COMPILER, *FLAGS, *(f"-I{path}" for path in includes), str(SOURCE)),
        *(*(f"-L{path}" for path in cpp_extension.library_paths()), *LIBRARIES, "-o", str(made)),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
