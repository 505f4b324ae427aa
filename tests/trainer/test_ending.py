"""How a rank ends early: what it raises, when it saves, when the watchdog is set; in a process group of one rank."""

import threading
from collections.abc import Callable, Iterator

import pytest

from async_rl.errors import AsyncRLError, Fenced, LeaderFailed, RewardError, RunStopped
from trainer.ending import Ending
from trainer.parallel import Parallel
from trainer.stop_signal import StopSignal

LONG_S = 1000.0


class Told(StopSignal):
    """As if SIGTERM had come."""

    @property
    def told(self) -> bool:
        return True


@pytest.fixture
def make_ending(parallel: Parallel) -> Iterator[Callable[..., Ending]]:
    endings: list[Ending] = []

    def make(stop: StopSignal | None = None) -> Ending:
        endings.append(Ending(parallel, stop or StopSignal(), LONG_S))
        return endings[-1]

    yield make
    for ending in endings:
        ending.close()


def num_watchdogs() -> int:
    return sum(isinstance(thread, threading.Timer) and not thread.finished.is_set() for thread in threading.enumerate())


def test_nothing_is_raised_while_nobody_ends(make_ending: Callable[..., Ending]) -> None:
    ending, saved = make_ending(), []
    with ending.saving(lambda: saved.append(1)):
        for _ in range(2):
            ending.tell()
            ending.watch()
            ending.meet(may_stop=True)
            ending.part()
    assert saved == [] and num_watchdogs() == 0


def test_a_rank_that_was_told_to_end_stops_where_it_watches_and_where_all_meet(
    make_ending: Callable[..., Ending],
) -> None:
    ending = make_ending(Told())
    with pytest.raises(RunStopped, match=r"^training rank 0 was told to end \(SIGTERM\)$"):
        ending.watch()
    with pytest.raises(RunStopped, match=r"^training rank 0 was told to end \(SIGTERM\)$"):
        ending.meet(may_stop=True)
    ending.meet(may_stop=False)  # in the middle of a step


def test_each_run_of_a_process_has_its_own_end(make_ending: Callable[..., Ending]) -> None:
    make_ending(Told()).tell()
    make_ending().watch()


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("error", [RewardError("no such column"), RunStopped("rank 3"), AsyncRLError("x")], ids=repr)
def test_a_named_error_saves_once_and_is_raised_itself(
    make_ending: Callable[..., Ending], error: AsyncRLError, together: bool
) -> None:
    ending, saved = make_ending(), []

    def save() -> None:
        assert num_watchdogs() == 1, "a save that hangs is cut short"
        saved.append(1)

    with pytest.raises(type(error)) as raised, ending.saving(save):
        ending.meet(may_stop=True)
        if not together:
            ending.part()
        raise error
    assert raised.value is error and saved == [1]
    ending.close()
    assert num_watchdogs() == 0


@pytest.mark.parametrize("together", [True, False])
def test_a_trainer_that_was_replaced_saves_nothing_and_the_other_ranks_learn_of_it(
    make_ending: Callable[..., Ending], together: bool
) -> None:
    ending, saved = make_ending(), []
    with pytest.raises(Fenced), ending.saving(lambda: saved.append(1)):
        ending.meet(may_stop=True)
        if not together:
            ending.part()
        raise Fenced("another trainer has taken over")
    assert saved == [] and num_watchdogs() == 1
    with pytest.raises(LeaderFailed, match="another training rank: Fenced: another trainer has taken over"):
        ending.watch()


def test_a_rank_that_fails_alone_is_heard_of_where_others_watch(make_ending: Callable[..., Ending]) -> None:
    ending = make_ending()
    with pytest.raises(RewardError), ending.saving(lambda: None):
        ending.part()
        raise RewardError("no such column")
    with pytest.raises(LeaderFailed, match=r"^another training rank: RewardError: no such column$"):
        ending.watch()


def test_a_failed_save_does_not_hide_why_the_run_ends(make_ending: Callable[..., Ending]) -> None:
    def save() -> None:
        raise OSError("disk full")

    with pytest.raises(RewardError, match="no such column"), make_ending().saving(save):
        raise RewardError("no such column")


@pytest.mark.parametrize("error", [KeyError("a mistake of ours"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_what_has_no_name_saves_nothing_and_is_cut_short_if_it_hangs(
    make_ending: Callable[..., Ending], error: BaseException
) -> None:
    saved: list[int] = []
    with pytest.raises(type(error)), make_ending().saving(lambda: saved.append(1)):
        raise error
    assert saved == [] and num_watchdogs() == 1


def test_sigterm_is_deferred_only_while_there_is_something_to_save(make_ending: Callable[..., Ending]) -> None:
    stop = StopSignal()
    with make_ending(stop).saving(lambda: None):
        assert stop.deferred
    assert not stop.deferred
    with pytest.raises(RewardError), make_ending(stop).saving(lambda: None):
        raise RewardError("x")
    assert not stop.deferred
