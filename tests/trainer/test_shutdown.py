"""How a rank ends early: what it raises, when it saves, when the watchdog is set; in a process group of one rank."""

import threading
from collections.abc import Callable, Iterator

import pytest

from async_rl.errors import AsyncRLError, Fenced, LeaderFailed, RewardError, RunStopped
from trainer.parallel import Parallel
from trainer.shutdown import Shutdown
from trainer.stop_signal import StopSignal

LONG_S = 1000.0


class StopRequested(StopSignal):
    """As if SIGTERM had come."""

    @property
    def is_requested(self) -> bool:
        return True


@pytest.fixture
def make_shutdown(parallel: Parallel) -> Iterator[Callable[..., Shutdown]]:
    shutdowns: list[Shutdown] = []

    def make(stop: StopSignal | None = None) -> Shutdown:
        shutdowns.append(Shutdown(parallel, stop or StopSignal(), LONG_S))
        return shutdowns[-1]

    yield make
    for shutdown in shutdowns:
        shutdown.close()


def num_watchdogs() -> int:
    return sum(isinstance(thread, threading.Timer) and not thread.finished.is_set() for thread in threading.enumerate())


def test_nothing_is_raised_while_nobody_ends(make_shutdown: Callable[..., Shutdown]) -> None:
    shutdown, saved = make_shutdown(), []
    with shutdown.saving(lambda: saved.append(1)):
        for _ in range(2):
            shutdown.announce_stop()
            shutdown.watch()
            shutdown.synchronize(may_stop=True)
            shutdown.separate()
    assert saved == [] and num_watchdogs() == 0


def test_a_rank_that_was_told_to_end_stops_where_it_watches_and_where_all_meet(
    make_shutdown: Callable[..., Shutdown],
) -> None:
    shutdown = make_shutdown(StopRequested())
    with pytest.raises(RunStopped, match=r"^training rank 0 was told to end \(SIGTERM\)$"):
        shutdown.watch()
    with pytest.raises(RunStopped, match=r"^training rank 0 was told to end \(SIGTERM\)$"):
        shutdown.synchronize(may_stop=True)
    shutdown.synchronize(may_stop=False)  # in the middle of a step


def test_each_run_of_a_process_has_its_own_end(make_shutdown: Callable[..., Shutdown]) -> None:
    make_shutdown(StopRequested()).announce_stop()
    make_shutdown().watch()


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("error", [RewardError("no such column"), RunStopped("rank 3"), AsyncRLError("x")], ids=repr)
def test_a_named_error_saves_once_and_is_raised_itself(
    make_shutdown: Callable[..., Shutdown], error: AsyncRLError, together: bool
) -> None:
    shutdown, saved = make_shutdown(), []

    def save() -> None:
        assert num_watchdogs() == 1, "a save that hangs is cut short"
        saved.append(1)

    with pytest.raises(type(error)) as raised, shutdown.saving(save):
        shutdown.synchronize(may_stop=True)
        if not together:
            shutdown.separate()
        raise error
    assert raised.value is error and saved == [1]
    shutdown.close()
    assert num_watchdogs() == 0


@pytest.mark.parametrize("together", [True, False])
def test_a_trainer_that_was_replaced_saves_nothing_and_the_other_ranks_learn_of_it(
    make_shutdown: Callable[..., Shutdown], together: bool
) -> None:
    shutdown, saved = make_shutdown(), []
    with pytest.raises(Fenced), shutdown.saving(lambda: saved.append(1)):
        shutdown.synchronize(may_stop=True)
        if not together:
            shutdown.separate()
        raise Fenced("another trainer has taken over")
    assert saved == [] and num_watchdogs() == 1
    with pytest.raises(LeaderFailed, match="another training rank: Fenced: another trainer has taken over"):
        shutdown.watch()


def test_a_rank_that_fails_alone_is_heard_of_where_others_watch(make_shutdown: Callable[..., Shutdown]) -> None:
    shutdown = make_shutdown()
    with pytest.raises(RewardError), shutdown.saving(lambda: None):
        shutdown.separate()
        raise RewardError("no such column")
    with pytest.raises(LeaderFailed, match=r"^another training rank: RewardError: no such column$"):
        shutdown.watch()


def test_a_failed_save_does_not_hide_why_the_run_ends(make_shutdown: Callable[..., Shutdown]) -> None:
    def save() -> None:
        raise OSError("disk full")

    with pytest.raises(RewardError, match="no such column"), make_shutdown().saving(save):
        raise RewardError("no such column")


@pytest.mark.parametrize("error", [KeyError("a mistake of ours"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_what_has_no_name_saves_nothing_and_is_cut_short_if_it_hangs(
    make_shutdown: Callable[..., Shutdown], error: BaseException
) -> None:
    saved: list[int] = []
    with pytest.raises(type(error)), make_shutdown().saving(lambda: saved.append(1)):
        raise error
    assert saved == [] and num_watchdogs() == 1


def test_sigterm_is_deferred_only_while_there_is_something_to_save(make_shutdown: Callable[..., Shutdown]) -> None:
    stop = StopSignal()
    with make_shutdown(stop).saving(lambda: None):
        assert stop.deferred
    assert not stop.deferred
    with pytest.raises(RewardError), make_shutdown(stop).saving(lambda: None):
        raise RewardError("x")
    assert not stop.deferred
