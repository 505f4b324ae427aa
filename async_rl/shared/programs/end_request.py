"""What the producer asks of the launcher of its host: to end instances that hold a device and do not give it up.

The request is a file of `run.dir`, with a reason for each URL. The launcher kills those processes, which it has started
itself, removes the file when they have ended, and starts them again. The producer waits for the file to be gone.
"""

import json
from collections.abc import Mapping
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
    """The request that stands, empty without one."""
    try:
        return dict(json.loads((run_dir / REQUEST_FILE).read_bytes()))
    except FileNotFoundError:
        return {}


def withdraw(run_dir: Path) -> None:
    """The instances have ended, or whoever asked waits no longer."""
    (run_dir / REQUEST_FILE).unlink(missing_ok=True)
