"""What the producer asks of the launcher of its host: to end instances that hold a device and do not give it up.

The request is a file of `run.dir`, with a reason for each URL. The launcher kills those of these processes that it has
started itself, and starts them again. It removes the file when all that are named have ended; with others among them it
stays. The producer waits for the file to be gone.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from async_rl.shared.files import write_file

REQUEST_FILE = "instances_to_end.json"


def ask_to_end(run_dir: Path, reasons: Mapping[str, str]) -> None:
    """`reasons` by the URLs of the instances.

    Raises:
        WriteFailed: nothing is asked.
    """
    write_file(run_dir / REQUEST_FILE, json.dumps(dict(reasons)))


def asked_to_end(run_dir: Path) -> dict[str, str]:
    """The request that stands; empty without one, and where something else has its name."""
    try:
        asked = json.loads((run_dir / REQUEST_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return asked if isinstance(asked, dict) and all(isinstance(why, str) for why in asked.values()) else {}


def is_answered(run_dir: Path) -> bool:
    """Whether nothing stands there any more."""
    return not (run_dir / REQUEST_FILE).exists()


def withdraw(run_dir: Path) -> None:
    """The instances have ended, or whoever asked waits no longer. What cannot be removed, as a directory, stays."""
    with suppress(OSError):
        (run_dir / REQUEST_FILE).unlink()
