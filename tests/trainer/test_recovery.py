"""When the loss of a producer is mended in place, and what all ranks do then; in a process group of one rank."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.errors import (
    AsyncRLError,
    ConfigError,
    Fenced,
    LeaderFailed,
    NoInstanceLeft,
    ProducerLost,
    RewardError,
    RunStopped,
)
from async_rl.method.types import Publication
from async_rl.producer.client import Control, RemoteRecorder
from async_rl.producer.process import END_TIMEOUT_S, ProducerAddress
from async_rl.records.recorder import IterationRecord
from async_rl.records.throughput import TrainingPool
from tests.support.minimal_config import config_of
from trainer.parallel import Parallel
from trainer.prompt_data import contents_of
from trainer.recovery import OwnProducer, RankState, Recovery, Replicas, Restart, obstacle
from trainer.shutdown import Shutdown
from trainer.stop_signal import StopSignal

LOST = ProducerLost("the producer has ended")


def state(error: str, **more: Any) -> RankState:
    return RankState(
        **{"error": error, "text": "why", "is_stop_requested": False, "iteration": 3, "is_sound": True} | more
    )


MAIN_LOST, LEADER_LOST = state("ProducerLost"), state("LeaderFailed")


@pytest.mark.parametrize(
    ("ranks", "num_losses", "why"),
    [
        ([MAIN_LOST], 0, None),
        ([MAIN_LOST, LEADER_LOST], 0, None),
        ([LEADER_LOST, MAIN_LOST, LEADER_LOST], 0, None),
        ([MAIN_LOST, state("RewardError")], 0, "another error: RewardError: why"),
        ([MAIN_LOST, state("RunStopped")], 0, "another error: RunStopped"),
        ([MAIN_LOST, state("ProducerFailed")], 0, "another error: ProducerFailed"),
        ([LEADER_LOST, LEADER_LOST], 0, "not the producer that was lost"),
        ([state("ProducerLost", is_sound=False), LEADER_LOST], 0, "some of the steps of a batch were taken"),
        ([MAIN_LOST, state("LeaderFailed", is_sound=False)], 0, "some of the steps of a batch were taken"),
        ([MAIN_LOST, state("LeaderFailed", iteration=4)], 0, "some of the steps of a batch were taken"),
        ([MAIN_LOST, LEADER_LOST], 1, "lost before in iteration 3"),
    ],
)
def test_only_a_lost_producer_before_a_step_and_once_is_replaced(
    ranks: list[RankState], num_losses: int, why: str | None
) -> None:
    found = obstacle(ranks, num_losses)
    assert found is None if why is None else found is not None and why in found


class Megatron:
    """Counts what is discarded."""

    def __init__(self) -> None:
        self.num_discarded = 0

    def discard(self) -> None:
        self.num_discarded += 1


class Whole:
    """What is saved, of a run whose iterations `loop` counts."""

    def __init__(self, first_iteration: int) -> None:
        self.first_iteration = self.first_unsound = first_iteration
        self.is_sound = True
        self.num_back = 0

    def go_back(self) -> None:
        self.num_back += 1


class Rig:
    """A recovery whose loop fails as it is told: in each run of it, at some iteration, by some error."""

    def __init__(self, parallel: Parallel, shutdown: Shutdown) -> None:
        self.shutdown = shutdown
        self.megatron, self.saving = Megatron(), Whole(2)
        self.restarted: list[int] = []
        self.begun: list[int] = []
        self.faults: list[tuple[int, AsyncRLError]] = []
        self.of_restart: AsyncRLError | None = None
        self._parallel = parallel

    def restart(self, iteration: int) -> list[Any]:
        self.restarted.append(iteration)
        if self.of_restart is not None:
            raise self.of_restart
        return ["127.0.0.1", 1, "secret"]

    def loop(self, iteration: int) -> None:
        self.begun.append(iteration)
        self.shutdown.synchronize(may_stop=True)
        if not self.faults:
            return
        self.saving.first_unsound, error = self.faults.pop(0)
        self.shutdown.separate()
        raise error

    def train(self, *faults: tuple[int, AsyncRLError]) -> None:
        self.faults = list(faults)
        parts: Any = (self.megatron, self.saving, None)
        with self.shutdown.saving(lambda: None):
            Recovery(self._parallel, self.shutdown, *parts, self.restart, 1.0).train(self.loop)


class Told(StopSignal):
    """SIGTERM comes when it is set."""

    requested = False

    @property
    def is_requested(self) -> bool:
        return self.requested


@pytest.fixture
def stop() -> Told:
    return Told()


@pytest.fixture
def rig(parallel: Parallel, stop: Told) -> Iterator[Rig]:
    shutdown = Shutdown(parallel, stop, 1000.0)
    yield Rig(parallel, shutdown)
    shutdown.close()


def num_watchdogs() -> int:
    return sum(isinstance(thread, threading.Timer) and not thread.finished.is_set() for thread in threading.enumerate())


def test_the_iteration_is_repeated_and_nothing_of_the_loss_stays(rig: Rig) -> None:
    rig.train((4, LOST))
    assert rig.begun == [2, 4] and rig.restarted == [4]
    assert rig.megatron.num_discarded == rig.saving.num_back == 1
    assert num_watchdogs() == 0, "the time limit of an end is off"
    rig.shutdown.watch()  # The error that was posted is forgotten.


def test_each_iteration_may_lose_a_producer(rig: Rig) -> None:
    rig.train((2, LOST), (3, LOST), (4, LOST))
    assert rig.begun == [2, 2, 3, 4] and rig.restarted == [2, 3, 4]


def test_the_second_loss_in_an_iteration_ends_the_run(rig: Rig) -> None:
    with pytest.raises(ProducerLost):
        rig.train((4, LOST), (4, LOST))
    assert rig.restarted == [4] and num_watchdogs() == 1


def test_a_loss_while_another_one_is_started_ends_the_run(rig: Rig) -> None:
    rig.of_restart = ProducerLost("again")
    with pytest.raises(ProducerLost, match=r"^again$"):
        rig.train((4, LOST))
    assert rig.restarted == [4] and rig.begun == [2]


@pytest.mark.parametrize("error", [RewardError("x"), LeaderFailed("x"), Fenced("x"), RunStopped("x")], ids=repr)
def test_no_other_error_starts_a_producer(rig: Rig, error: AsyncRLError) -> None:
    with pytest.raises(type(error)):
        rig.train((4, error))
    assert rig.restarted == [] and num_watchdogs() == 1


def test_what_keeps_another_one_from_starting_ends_the_run(rig: Rig) -> None:
    rig.of_restart = NoInstanceLeft("none came back")
    with pytest.raises(NoInstanceLeft):
        rig.train((4, LOST))
    assert rig.restarted == [4]


def test_a_run_that_was_told_to_end_loses_no_time_on_another_one(rig: Rig, stop: Told) -> None:
    def lose(iteration: int) -> None:
        stop.requested = True
        raise LOST

    rig.loop = lose  # type: ignore[method-assign]
    with pytest.raises(RunStopped, match=r"^training rank 0 was told to end \(SIGTERM\)$"):
        rig.train()
    assert rig.restarted == []


class Replaced:
    """The main rank's producer and sender, which note what is asked of them."""

    def __init__(self, digests: dict[str, str]) -> None:
        self.done: list[Any] = []
        self.control = SimpleNamespace(
            begin=lambda *_: self.done.append("load"), result=lambda **_: {"digests": digests}
        )
        self.address = ProducerAddress("127.0.0.1", 7, "secret")

    def leave_group(self) -> None:
        self.done.append("leave group")

    def replace(self, watch: Any) -> None:
        self.done.append("replace")

    def open(self, iteration: int, *_: Any) -> None:
        self.done.append(("open", iteration))

    # As a connection

    def send(self, message: Any) -> None:
        self.done.append(message["call"])

    def receive(self, wait_s: float) -> Any:
        return {"done": None}, b""


def restart(tmp_path: Path, model: Path, digests: dict[str, str]) -> tuple[Restart, Replaced]:
    """Of a run with records of iterations 3 and 4, whose prompts had the digest "old"."""
    config = config_of(run={"dir": str(tmp_path)}, model={"path": str(model)})
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 3}\n{"iteration": 4}\n{"itera')
    parts: Any = Replaced(digests)
    before = contents_of(config, {"digests": {"0 to 9": "old"}}, "")
    recorder: Any = RemoteRecorder(Control(parts), lambda: None)
    return Restart(
        config, parts, parts, before, Replicas(1, TrainingPool(1), True), recorder, lambda: None, lambda: None
    ), parts


def test_records_of_the_unfinished_iteration_are_cut_before_another_producer_opens(
    tmp_path: Path, tiny_model: Any
) -> None:
    begin, parts = restart(tmp_path, tiny_model(), {"0 to 9": "old"})
    assert begin(4) == ["127.0.0.1", 7, "secret"]
    assert parts.done == ["leave group", "replace", "load", ("open", 4)]
    assert (tmp_path / "metrics.jsonl").read_text() == '{"iteration": 3}\n'


@pytest.mark.parametrize("is_written", [True, False])
def test_the_record_of_a_whole_iteration_is_written_by_another_producer_once(
    tmp_path: Path, tiny_model: Any, is_written: bool
) -> None:
    """The lost one may have written it, and had no time to say so."""
    begin, parts = restart(tmp_path, tiny_model(), {"0 to 9": "old"})
    begin.recorder.keep_unwritten(IterationRecord(3), Publication("v", "", (), 0, 0.0))
    if not is_written:
        (tmp_path / "metrics.jsonl").write_text('{"iteration": 2}\n')
    begin(4)
    assert parts.done == ["leave group", "replace", "load", ("open", 4), "end_iteration"]
    assert (tmp_path / "metrics.jsonl").read_text() == ("" if is_written else '{"iteration": 2}\n')
    parts.done.clear()
    begin(4)
    assert "end_iteration" not in parts.done


def test_prompts_that_have_changed_meanwhile_are_not_trained(tmp_path: Path, tiny_model: Any) -> None:
    begin, parts = restart(tmp_path, tiny_model(), {"0 to 9": "new"})
    with pytest.raises(ConfigError, match="the prompts have changed somewhere in rows 0 to 9"):
        begin(4)
    assert parts.done == ["leave group", "replace", "load"]


@pytest.mark.parametrize("is_lost", [False, True])
def test_the_end_of_a_lost_producer_is_not_waited_for(is_lost: bool) -> None:
    ends: list[float] = []
    process: Any = SimpleNamespace(end=ends.append)
    with OwnProducer(lambda: process, 5.0) as producer:
        silent: Any = SimpleNamespace(close=lambda: None, send=lambda message: None, receive=_lose)
        producer._control = Control(silent)
        producer._is_open = True
        if is_lost:
            with pytest.raises(ProducerLost):
                producer.control.call("evaluate_trained", "v1")
    assert ends == [0.0 if is_lost else END_TIMEOUT_S]


def _lose(wait_s: float) -> None:
    raise LOST
