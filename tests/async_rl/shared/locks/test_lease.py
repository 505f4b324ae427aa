"""The lease on a run's directory: who may take it, when, and how its holder learns that it is lost."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from async_rl.errors import Fenced, RunDirInUse, WriteFailed
from async_rl.shared.locks.lease import LEASE_DIR, Lease, read_term, take_lease
from async_rl.shared.locks.process_identity import has_died, this_process
from tests.support.clock import Clock
from tests.support.waiting import wait_for

TTL_S = 20.0


def take(run_dir: Path, during: Callable[[], object] = lambda: None) -> tuple[Lease, float]:
    """The next lease, and how long it was waited for."""
    clock = Clock(during)
    lease = take_lease(run_dir, TTL_S, clock, clock.sleep)
    return lease, clock.passed_s


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / LEASE_DIR).iterdir())


def alter(run_dir: Path, **fields: object) -> None:
    """Rewrites the newest term's file, as another host would have written it."""
    term = read_term(run_dir)
    assert term is not None
    (run_dir / LEASE_DIR / f"{term.term:08}").write_text(json.dumps(asdict(replace(term, **fields))))


def elsewhere(run_dir: Path) -> None:
    """The holder is a process of another host."""
    alter(run_dir, host="other", process=replace(this_process(), kernel="another kernel"))


def test_the_first_term_is_taken_at_once_and_the_next_one_after_a_clean_end(tmp_path: Path) -> None:
    first, waited_s = take(tmp_path)
    assert (first.term, waited_s) == (1, 0.0) and names(tmp_path) == ["00000001", "run"]
    first.release()
    elsewhere(tmp_path)
    second, waited_s = take(tmp_path)
    assert (second.term, waited_s) == (2, 0.0) and names(tmp_path) == ["00000002", "run"]
    assert first.name.split(":")[0] == second.name.split(":")[0], "the run keeps its uid"
    assert second.name.endswith(":2")


def test_another_holder_is_waited_for_as_long_as_it_told_by_the_own_clock(tmp_path: Path) -> None:
    take(tmp_path)
    elsewhere(tmp_path)
    alter(tmp_path, ttl_s=7.0)
    # Its host's clock is years ahead.
    file = tmp_path / LEASE_DIR / "00000001"
    os.utime(file, (2e9, 2e9))
    second, waited_s = take(tmp_path)
    assert second.term == 2 and 7.0 < waited_s < 8.0


def test_a_holder_that_is_alive_is_not_replaced(tmp_path: Path) -> None:
    first, _ = take(tmp_path)
    num_polls = 0

    def renews() -> None:
        nonlocal num_polls
        num_polls += 1
        if num_polls == 20:
            first.renew()

    with pytest.raises(RunDirInUse, match=r"is in use by .* term 1\), which is alive: wait for its end, or name"):
        take(tmp_path, renews)
    first.require()


def test_a_holder_that_ends_while_it_is_watched_is_followed_at_once(tmp_path: Path) -> None:
    first, _ = take(tmp_path)
    num_polls = 0

    def ends() -> None:
        nonlocal num_polls
        num_polls += 1
        if num_polls == 10:
            first.release()

    second, waited_s = take(tmp_path, ends)
    assert second.term == 2 and 1.9 < waited_s < 3.0


@pytest.mark.distributed
def test_a_dead_process_of_this_host_is_followed_at_once(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from async_rl.shared.locks.lease import take_lease\n"
    code += "take_lease(Path(sys.argv[1]), 20.0); import os; os._exit(9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    held = read_term(tmp_path)
    assert held is not None and not held.released
    second, waited_s = take(tmp_path)
    assert (second.term, waited_s) == (2, 0.0)


def test_another_process_with_the_number_of_a_dead_one_is_told_apart() -> None:
    alive = this_process()
    assert not has_died(alive)
    assert has_died(replace(alive, started="1"))
    assert not has_died(replace(alive, started="1", kernel="another kernel")), "nothing is known of other hosts"


def test_whoever_was_replaced_learns_it_at_every_check_and_changes_nothing(tmp_path: Path) -> None:
    first, _ = take(tmp_path)
    elsewhere(tmp_path)
    second, _ = take(tmp_path)
    before = read_term(tmp_path)
    for check in (first.require, first.renew):
        with pytest.raises(Fenced, match=r"term 1 of run.dir .* has taken over with term 2"):
            check()
    first.release()
    assert read_term(tmp_path) == before and names(tmp_path) == ["00000002", "run"]
    second.renew()


@pytest.mark.parametrize("what", ["file", "directory"])
def test_a_holder_whose_file_is_gone_is_fenced(tmp_path: Path, what: str) -> None:
    lease, _ = take(tmp_path)
    for path in (tmp_path / LEASE_DIR).iterdir():
        path.unlink()
    if what == "directory":
        (tmp_path / LEASE_DIR).rmdir()
    with pytest.raises(Fenced, match="its file was removed"):
        lease.require()


def test_leftovers_of_any_kind_are_ignored(tmp_path: Path) -> None:
    directory = tmp_path / LEASE_DIR
    directory.mkdir()
    for name in (".00000009.partial", "00000009~", "9", "notes", "00000003"):
        (directory / name).write_bytes(b"")
    # The empty one is a term whose holder died while it wrote: it counts, and is waited for.
    lease, waited_s = take(tmp_path)
    assert lease.term == 4 and TTL_S < waited_s < TTL_S + 1
    assert names(tmp_path) == [".00000009.partial", "00000004", "00000009~", "9", "notes", "run"]


def test_a_taker_that_slept_through_two_terms_does_not_take_one_in_between(tmp_path: Path) -> None:
    take(tmp_path)
    elsewhere(tmp_path)
    num_polls = 0

    def others_take_two_terms() -> None:
        nonlocal num_polls
        num_polls += 1
        if num_polls == 1:
            # Between its look at the terms and its creation of the next file.
            alter(tmp_path, released=True)
            for _ in range(2):
                take(tmp_path)[0].release()

    lease, _ = take(tmp_path, others_take_two_terms)
    assert lease.term == 4 and "00000002" not in names(tmp_path)


def _race(run_dir: str, barrier: "threading.Barrier", won: "multiprocessing.Queue[int]") -> None:
    barrier.wait()
    try:
        lease = take_lease(Path(run_dir), 12.0)
    except RunDirInUse:
        won.put(0)
        return
    lease.keep(lambda error: None)
    time.sleep(5.0)
    lease.require()
    won.put(lease.term)


@pytest.mark.distributed
def test_of_several_takers_at_once_exactly_one_wins(tmp_path: Path) -> None:
    take(tmp_path)[0].release()
    context = multiprocessing.get_context("spawn")
    barrier, won = context.Barrier(4), context.Queue()
    takers = [context.Process(target=_race, args=(str(tmp_path), barrier, won)) for _ in range(4)]
    for taker in takers:
        taker.start()
    found = sorted(won.get(timeout=200) for _ in takers)
    for taker in takers:
        taker.join()
    assert found == [0, 0, 0, 2]


def test_a_kept_lease_is_renewed_until_it_is_lost_and_then_its_holder_is_told(tmp_path: Path) -> None:
    lease, lost, told = take_lease(tmp_path, 0.4), threading.Event(), []

    def on_loss(error: Fenced) -> None:
        told.append(error)
        lost.set()

    lease.keep(on_loss)
    wait_for(lambda: num_renewals(tmp_path) >= 4)
    assert not told
    (tmp_path / LEASE_DIR / "00000002").write_text("")
    assert lost.wait(60) and isinstance(told[0], Fenced)


def num_renewals(run_dir: Path) -> int:
    """0 while its file is being written."""
    term = read_term(run_dir)
    return 0 if term is None else term.renewals


def test_a_file_system_that_is_away_for_a_moment_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lease, told = take_lease(tmp_path, 0.2), []
    lease.keep(told.append)
    directory = tmp_path / LEASE_DIR
    directory.rename(tmp_path / "away")
    directory.write_text("not a directory")
    with pytest.raises(WriteFailed):
        lease.require()
    wait_for(lambda: "the lease cannot be renewed, trying on" in caplog.text)
    directory.unlink()
    (tmp_path / "away").rename(directory)
    num_before = num_renewals(tmp_path)
    wait_for(lambda: num_renewals(tmp_path) > num_before)
    lease.require()
    assert not told
    lease.release()


def test_a_copied_directory_is_free_after_the_time_of_its_lease(tmp_path: Path) -> None:
    """The copy of a running run's directory: nobody renews it there."""
    lease, _ = take(tmp_path)
    copy = tmp_path / "copy"
    (copy / LEASE_DIR).mkdir(parents=True)
    for path in (tmp_path / LEASE_DIR).iterdir():
        (copy / LEASE_DIR / path.name).write_bytes(path.read_bytes())
    other, waited_s = take(copy)
    assert other.term == 2 and waited_s > TTL_S
    lease.require()
