"""Runs a target of the Makefile, as a user does."""

import os
import subprocess

from tests.support import ROOT


def make(target: str, arguments: str, *more: str, timeout_s: float = 280) -> str:
    """Runs a make target to its end; returns what it printed. `more`: further words for make."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", target, f"ARGS={arguments}", *more],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
