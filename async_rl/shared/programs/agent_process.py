"""Processes of agents and their environments: how they start, and with which variables."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence

from async_rl.config.cluster_section import TOKEN_VARIABLE
from async_rl.shared.programs import process_guard

OWN_VARIABLES = (TOKEN_VARIABLE, "PYTHONSAFEPATH")
"""Agents do not get these: the token of the run's servers, and what our programs run with."""


async def start_guarded(
    command: Sequence[str],
    environment: Mapping[str, str],
    grace_s: float,
    stdin: str = os.devnull,
    stderr: int | None = None,
) -> Process:
    """Starts a command, which reads the file `stdin`, under its guard: closing the standard input of the process that
    this returns ends it, and whatever it has started, SIGKILL coming `grace_s` after SIGTERM.

    Raises:
        OSError: there are too many open files or processes.
    """
    return await asyncio.create_subprocess_exec(
        # By its path, without site-packages, and without modules of the working directory: it starts faster.
        *(sys.executable, "-I", "-S", process_guard.__file__, "--grace-s", str(grace_s), "--stdin", stdin),
        *("--", *command),
        stdin=PIPE,
        stdout=PIPE,
        stderr=stderr,
        env=environment,
        start_new_session=True,
    )


def agent_environment(*hosts: str) -> dict[str, str]:
    """The variables of this process, without our own; `hosts` are reached directly, whatever proxy leads elsewhere."""
    environment = {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}
    direct = {name: ",".join(filter(None, [environment.get(name), *hosts])) for name in ("NO_PROXY", "no_proxy")}
    return {**environment, **direct}
