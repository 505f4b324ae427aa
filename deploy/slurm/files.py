"""The files of a Slurm run in `run.dir/slurm/`, and its token."""

import os
import secrets
from pathlib import Path

from async_rl.shared.files import named_write_errors

TRAINING = "training.sbatch"
NODE = "node.sh"
INSTANCES = "instances.sbatch"


def folder_of(run_dir: Path) -> Path:
    return run_dir / "slurm"


def token_file(run_dir: Path) -> Path:
    return folder_of(run_dir) / "token"


def write_token(run_dir: Path, token: str | None) -> None:
    """Writes the run's token to a file that only its user can read; without one, that of the file, or a new one.

    A file, and not the environment of `sbatch`: Slurm keeps the latter in the controller's state and, where
    `AccountingStoreFlags` says so, in its data base; and a job that is started with `--export=NONE` has no other.

    Raises:
        WriteFailed: it cannot be written.
    """
    file = token_file(run_dir)
    token = token or read_token(run_dir) or secrets.token_urlsafe(32)
    with named_write_errors(file):
        file.unlink(missing_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as opened:
            opened.write(token)


def read_token(run_dir: Path) -> str | None:
    """The run's token; None where there is none, or this user may not read it."""
    try:
        return token_file(run_dir).read_text().strip()
    except OSError:
        return None
