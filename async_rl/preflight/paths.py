"""Checks that a run may write to its configured directories."""

import os
from pathlib import Path

from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.locks.run_lock import require_unlocked
from async_rl.tracking.records import require_no_records


def require_paths(config: Config) -> None:
    """Checks `run.dir`, `publish.snapshot_dir` and `prompts.cache_dir`; creates none of them.

    Raises:
        ConfigError: one cannot be created or written, or `run.dir` has records of another run, or is in use by one.
    """
    _require_directory("run.dir", config.run.dir)
    require_unlocked(config.run.dir)
    require_no_records(config.run)
    others = {"publish.snapshot_dir": config.publish.snapshot_dir, "prompts.cache_dir": config.prompts.cache_dir}
    for key, path in others.items():
        if path is not None:
            _require_directory(key, path)


def _require_directory(key: str, path: Path) -> None:
    """Checks that `path` is a directory that can be written to, or can be created."""
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not existing.is_dir():
        raise ConfigError(f"{key} is {str(path)!r}, but {str(existing)!r} is a file: name a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{key} is {str(path)!r}, but {str(existing)!r} cannot be written to by this user: name another directory"
        )
