"""A program that loads before it may work: it waits at a gate that its starter opens; for `async-rl run` and a trainer.

The starter sets `VARIABLE` to the path of a file that does not exist yet, and makes that file when the program may go
on. A program that is started again later finds the file, and does not wait.
"""

import time
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "ASYNC_RL_START_FILE"

POLL_S = 0.05


def wait_at_gate(environment: Mapping[str, str]) -> None:
    """Returns when the starter has opened the gate: at once where it set none.

    Without a time limit: the starter ends a program that it will not let pass, and so does the program's guard where
    the starter has ended.
    """
    if VARIABLE in environment:
        gate = Path(environment[VARIABLE])
        while not gate.exists():
            time.sleep(POLL_S)
