"""Ranks that miss each other: the rule on a clock of its own, and real ranks under torchrun."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.common.hosts import Host, Hosts, environment, why_not
from tests.support.clock import Clock
from tests.support.waiting import wait_for
from trainer.lifeline import CLOSED, Silence

WORKER = "tests.support.trainer.lifeline_worker"
LOST_AFTER_S = 6.0
START_S = 120.0

MARGIN_S = 60.0
"""For torchrun, and for other work of the machine; a collective would wait for hours."""


def after(silence: Silence, clock: Clock, *steps_s: float) -> None:
    for step_s in steps_s:
        clock.sleep(step_s)
        silence.note_time()


def test_a_rank_is_lost_when_its_count_stands_still() -> None:
    clock = Clock()
    silence = Silence(2.0, clock)
    silence.note_count(1, 0)
    silence.note_count(2, 0)
    after(silence, clock, 1.0, 1.0, 1.0)
    silence.note_count(1, 1)
    silence.note_count(2, 0)
    assert silence.longer_than(2.5) == [2] and silence.longer_than(3.0) == []
    after(silence, clock, 1.0)
    assert silence.longer_than(3.0) == [2]


def test_time_in_which_this_process_was_stopped_makes_nobody_silent() -> None:
    clock = Clock()
    silence = Silence(2.0, clock)
    silence.note_count(1, 0)
    after(silence, clock, 1000.0)
    assert silence.longer_than(2.0) == []
    after(silence, clock, 1.0)
    assert silence.longer_than(2.0) == [1]


def test_a_rank_that_has_closed_is_not_missed() -> None:
    clock = Clock()
    silence = Silence(2.0, clock)
    silence.note_count(1, CLOSED + 7)
    after(silence, clock, *[1.0] * 50)
    assert silence.longer_than(3.0) == []


class Ranks:
    """Two ranks of a torchrun on each of some hosts, or on this machine, with their outputs in files."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self, mode: str, *launcher: str, host: Host | None = None, lost_after_s: float = LOST_AFTER_S) -> None:
        words = [sys.executable, "-m", "torch.distributed.run", *launcher, "-m", WORKER]
        words += [str(self._path), str(lost_after_s), mode]
        with (self._path / f"agent-{len(self.agents)}.txt").open("wb") as log:
            self.agents.append(
                subprocess.Popen(
                    host.command(words) if host else words,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment(),
                )
            )

    def said(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self._path.glob("agent-*.txt")))

    def pid(self, rank: int) -> int:
        """Once the rank watches the others."""
        return int(self._wait_for(self._path / f"rank-{rank}.pid"))

    def wait_for_end(self, rank: int, timeout_s: float) -> None:
        """Also of one that its agent has not waited for yet, since it waits for the stopped one first."""
        wait_for(lambda: not _is_alive(self.pid(rank)), timeout_s, self.said)

    def _wait_for(self, file: Path) -> str:
        wait_for(lambda: file.exists() and file.read_text(), START_S, self.said)
        return file.read_text()

    def close(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                for part in [*psutil.Process(agent.pid).children(recursive=True), psutil.Process(agent.pid)]:
                    part.kill()
            agent.wait()


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path)
    yield ranks
    ranks.close()


STANDALONE = ("--standalone", "--nproc-per-node", "3")


@pytest.mark.distributed
@pytest.mark.parametrize("stopped", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_stopped_rank_ends_the_others_in_time_though_they_wait_in_a_collective(ranks: Ranks, stopped: int) -> None:
    ranks.start("waits", *STANDALONE)
    pids = [ranks.pid(rank) for rank in range(3)]
    time.sleep(LOST_AFTER_S / 2)
    begun_s = time.monotonic()
    os.kill(pids[stopped], signal.SIGSTOP)
    for rank in {0, 1, 2} - {stopped}:
        ranks.wait_for_end(rank, LOST_AFTER_S + MARGIN_S)
    assert LOST_AFTER_S / 2 < time.monotonic() - begun_s < LOST_AFTER_S + MARGIN_S
    said = ranks.said()
    assert f"RankLost: nothing was heard of training rank {stopped} for 4 s" in said, said


@pytest.mark.nightly
@pytest.mark.distributed
def test_ranks_that_are_stopped_together_go_on_together(ranks: Ranks) -> None:
    ranks.start("ends", *STANDALONE, lost_after_s=4.0)
    pids = [ranks.pid(rank) for rank in range(3)]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, number)
        if number is signal.SIGSTOP:
            time.sleep(6.0)
    assert ranks.agents[0].wait(START_S) == 0, ranks.said()


@pytest.mark.nightly
@pytest.mark.distributed
def test_ranks_that_compute_load_and_end_at_different_times_are_not_lost(ranks: Ranks) -> None:
    """A collective that lasts twice the limit, and an end that others follow three limits later."""
    ranks.start("ends apart", *STANDALONE, lost_after_s=4.0)
    assert ranks.agents[0].wait(START_S) == 0, ranks.said()
    assert "RankLost" not in ranks.said()


@pytest.mark.nightly
@pytest.mark.distributed
def test_a_cut_link_ends_the_ranks_on_both_sides(ranks: Ranks) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    hosts = Hosts({"net": "/24"}, {f"n{i}": {"none": "127.0.1.1", "net": f"10.79.1.{i}"} for i in (1, 2)})
    try:
        for node in range(2):
            launcher = ("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1")
            launcher += ("--master-addr", "10.79.1.1", "--master-port", "29500")
            ranks.start("waits", *launcher, host=hosts[f"n{node + 1}"])
        for rank in range(2):
            ranks.pid(rank)
        hosts["n2"].cut("net")
        begun_s = time.monotonic()
        for rank in range(2):
            ranks.wait_for_end(rank, LOST_AFTER_S + MARGIN_S)
        assert time.monotonic() - begun_s < LOST_AFTER_S + MARGIN_S
        said = ranks.said()
        assert "RankLost: nothing was heard of training rank 1" in said, said
        assert "RankLost: training rank 1 has not reached the store" in said, said
    finally:
        ranks.close()
        hosts.close()
