"""Checks that the training ranks share the run's directory, as checkpoints need; before anything is read from there."""

import platform
import time
from pathlib import Path

from async_rl.errors import ConfigError
from async_rl.shared.locks.lease import read_term
from trainer.parallel import Parallel

WAIT_S = 60.0
"""A client of NFS may show a directory as it was a minute ago (its default `acdirmax`)."""

POLL_S = 0.2


def require_shared(run_dir: Path, lease_name: str, parallel: Parallel, wait_s: float = WAIT_S) -> None:
    """Waits until all ranks see the lease that the main rank has taken; all ranks call it.

    Args:
        lease_name: `RUN_UID:TERM`.

    Raises:
        ConfigError: on all ranks, after `wait_s`: some do not.
    """
    hosts = parallel.gather_json(None if _sees(run_dir, lease_name, wait_s) else platform.node())
    apart = {rank: host for rank, host in enumerate(hosts) if host is not None}
    if apart:
        raise ConfigError(
            f"run.dir {str(run_dir)!r} is not the same directory on all training hosts: rank "
            f"{', '.join(map(str, apart))} on {', '.join(sorted(set(apart.values())))} does not see what rank 0 wrote "
            "there; put it on a file system that they share, or set checkpoint.every = 0 and run.resume = false"
        )


def _sees(run_dir: Path, lease_name: str, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while (term := read_term(run_dir)) is None or f"{term.run}:{term.term}" != lease_name:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
