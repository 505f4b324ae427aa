"""Real processes under their guards, which do what a file tells them."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.errors import ProcessFailed, RestartsExhausted
from deploy.cluster.process import Process
from deploy.cluster.restarts import Restarts
from deploy.cluster.supervised_process import ENDED, SupervisedProcess
from deploy.local.processes import Deployment

pytestmark = pytest.mark.distributed

DELAY_S = 0.1
WAIT_S = 60


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    with Deployment() as deployment:
        yield deployment


def keep(deployment: Deployment, tmp_path: Path, code: str, limit: int = 2, trained: int = 0) -> SupervisedProcess:
    """The program `code`, which finds the words of its command in `sys.argv`."""
    process = Process("trainer", "trainer", (sys.executable, "-c", code), tmp_path / "log")
    restarts = Restarts(limit, DELAY_S)
    return SupervisedProcess(deployment.start(process), deployment.start, restarts, lambda: trained, ("--again",))


def follow(kept: SupervisedProcess) -> list[str]:
    """What happens until it has ended."""
    events = []
    deadline = time.monotonic() + WAIT_S
    while kept.state not in ENDED:
        assert time.monotonic() < deadline, events
        if (event := kept.check()) is not None:
            events.append(event)
        time.sleep(0.01)
    return events


def test_a_process_that_is_killed_is_started_again_with_more_words(deployment: Deployment, tmp_path: Path) -> None:
    code = "import os, sys\nif sys.argv[1:] != ['--again']: os.kill(os.getpid(), 9)"
    kept = keep(deployment, tmp_path, code)
    events = follow(kept)
    assert kept.state == "done" and kept.failure is None and kept.restarts.total == 1
    assert events[0].startswith(f"lost trainer, it is started again in {DELAY_S} s: ") and "SIGKILL" in events[0]
    assert events[1:] == ["trainer is started again (restart 1)", "trainer has ended"]


def test_a_process_that_is_killed_for_a_reason_is_started_again_and_the_reason_is_told(
    deployment: Deployment, tmp_path: Path
) -> None:
    kept = keep(deployment, tmp_path, "import sys, time\nif sys.argv[1:] != ['--again']: time.sleep(600)")
    kept.kill("did not go to sleep")
    events = follow(kept)
    assert events[0] == f"lost trainer, it is started again in {DELAY_S} s: trainer did not go to sleep"
    assert kept.cause == "trainer did not go to sleep" and kept.restarts.total == 1 and kept.state == "done"
    kept.kill("has ended already")
    assert kept.check() is None


def test_one_that_always_dies_fails_with_the_last_cause(deployment: Deployment, tmp_path: Path) -> None:
    begun = time.monotonic()
    kept = keep(deployment, tmp_path, "raise RuntimeError('the optimizer melted')")
    follow(kept)
    assert isinstance(kept.failure, RestartsExhausted) and kept.restarts.total == 2
    assert "2 times without another iteration" in str(kept.failure) and "the optimizer melted" in str(kept.failure)
    assert time.monotonic() - begun >= 3 * DELAY_S, "one delay, and one twice as long"


@pytest.mark.parametrize("code", [2, 4, 5, 143])
def test_an_end_that_no_restart_mends_is_the_last_one(deployment: Deployment, tmp_path: Path, code: int) -> None:
    kept = keep(deployment, tmp_path, f"import os; os._exit({code})")
    follow(kept)
    assert type(kept.failure) is ProcessFailed and kept.restarts.total == 0


def test_a_named_error_that_cannot_pass_is_the_last_one(deployment: Deployment, tmp_path: Path) -> None:
    code = (
        "import os\nfrom async_rl.errors import RewardError\n"
        "from async_rl.shared.programs.failure_report import report_failure\n"
        "report_failure(RewardError('reward x failed'), os.environ)\nos._exit(1)"
    )
    kept = keep(deployment, tmp_path, code)
    follow(kept)
    assert isinstance(kept.failure, ProcessFailed) and kept.failure.cause == "RewardError"
    assert kept.restarts.total == 0


def test_the_report_of_an_earlier_start_is_not_read_again(deployment: Deployment, tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom async_rl.errors import PublishError\n"
        "from async_rl.shared.programs.failure_report import report_failure\n"
        "if sys.argv[1:] == ['--again']: os._exit(4)\n"
        "report_failure(PublishError('no instance took the weights'), os.environ)\nos._exit(1)"
    )
    kept = keep(deployment, tmp_path, code)
    follow(kept)
    assert kept.restarts.total == 1
    assert isinstance(kept.failure, ProcessFailed) and "exited with code 4" in str(kept.failure)


def test_without_a_limit_above_0_its_own_failure_is_the_error(deployment: Deployment, tmp_path: Path) -> None:
    kept = keep(deployment, tmp_path, "import os; os._exit(1)", limit=0)
    follow(kept)
    assert type(kept.failure) is ProcessFailed


def test_told_to_restart_no_more_it_ends_with_its_next_failure(deployment: Deployment, tmp_path: Path) -> None:
    kept = keep(deployment, tmp_path, "import os; os._exit(1)")
    kept.restart_no_more()
    follow(kept)
    assert type(kept.failure) is ProcessFailed and kept.restarts.total == 0


@pytest.mark.parametrize("first", [True, False])
def test_a_first_start_that_finds_another_run_is_the_last_one(
    deployment: Deployment, tmp_path: Path, first: bool
) -> None:
    """A later one may find what is left of itself, which is still saving."""
    code = "import os\nfrom async_rl.errors import RunDirInUse as InUse\n"
    code += "from async_rl.shared.programs.failure_report import report_failure\n"
    code += "report_failure(InUse('it is in use'), os.environ)\nos._exit(1)"
    kept = keep(deployment, tmp_path, code)
    kept.final_at_first = "RunDirInUse" if first else None
    follow(kept)
    assert kept.restarts.total == (0 if first else 2) and "it is in use" in str(kept.failure)
