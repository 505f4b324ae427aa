"""Training hosts that do not share the run's directory are named, instead of saving parts of checkpoints apart."""

import platform
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from async_rl.errors import ConfigError
from async_rl.shared.locks.lease import take_lease
from trainer.parallel import Parallel
from trainer.shared_directory import require_shared


class FakeParallel:
    """Two ranks, of which the first sees its own directory."""

    def gather_json(self, obj: Any) -> list[Any]:
        return [None, obj]


PARALLEL = cast(Parallel, FakeParallel())


def test_a_rank_that_sees_the_lease_of_the_main_rank_goes_on(tmp_path: Path) -> None:
    lease = take_lease(tmp_path, 20.0)
    require_shared(tmp_path, lease.name, PARALLEL, wait_s=0.0)


def test_a_rank_with_a_directory_of_its_own_is_named(tmp_path: Path) -> None:
    lease = take_lease(tmp_path, 20.0)
    other = tmp_path / "on-another-disk"
    other.mkdir()
    with pytest.raises(ConfigError, match=f"rank 1 on {platform.node()} does not see .* checkpoint.every = 0"):
        require_shared(other, lease.name, PARALLEL, wait_s=0.3)
    take_lease(other, 20.0)
    with pytest.raises(ConfigError, match="not the same directory"):
        require_shared(other, lease.name, PARALLEL, wait_s=0.0)


def test_a_file_server_may_show_the_lease_late(tmp_path: Path) -> None:
    server, late = tmp_path / "server", tmp_path / "late"
    server.mkdir()
    lease = take_lease(server, 20.0)
    threading.Timer(0.5, lambda: late.symlink_to(server)).start()
    begun_s = time.monotonic()
    require_shared(late, lease.name, PARALLEL, wait_s=20.0)
    assert time.monotonic() - begun_s >= 0.4
