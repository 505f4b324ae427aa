import asyncio
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from async_rl.errors import EventLoopLost, WaitTimedOut
from async_rl.shared.event_loop import EventLoopThread


async def doubled(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


async def fail() -> None:
    raise ValueError("from the loop")


def test_run_returns_the_result_of_a_coroutine_on_another_thread(loop: EventLoopThread) -> None:
    async def name() -> str:
        return threading.current_thread().name

    assert loop.run(doubled(21)) == 42
    assert loop.run(name()) != threading.current_thread().name


def test_run_raises_the_coroutines_error(loop: EventLoopThread) -> None:
    with pytest.raises(ValueError, match="from the loop"):
        loop.run(fail())


def test_run_cancels_what_takes_longer_than_its_timeout(loop: EventLoopThread) -> None:
    ended = threading.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        loop.run(hang(), timeout_s=0.05)
    assert ended.wait(60)


def test_close_ends_what_still_runs_and_refuses_more() -> None:
    loop = EventLoopThread()
    started, ended = threading.Event(), threading.Event()

    async def hang() -> None:
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    future = loop.submit(hang())
    assert started.wait(60)
    loop.close()
    assert ended.is_set() and future.cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        loop.submit(doubled(1))
    loop.close()


async def exit_early() -> None:
    sys.exit(3)


async def interrupt() -> None:
    raise KeyboardInterrupt


async def cancel_itself() -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize("end", [exit_early, interrupt, cancel_itself])
def test_a_coroutine_that_would_end_the_loop_is_an_error_and_the_loop_goes_on(
    loop: EventLoopThread, end: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    beside = loop.submit(asyncio.sleep(0.2, "whole"))
    with pytest.raises(EventLoopLost, match=end.__name__):
        loop.run(end(), timeout_s=60)
    assert beside.result(60) == "whole"
    assert loop.run(doubled(2)) == 4


def test_nobody_waits_for_a_thread_that_has_ended(loop: EventLoopThread) -> None:
    """Whatever ended it: here the loop is stopped for good from inside."""

    async def end_thread() -> None:
        loop._closed = True
        asyncio.get_running_loop().stop()

    waiting = loop.submit(asyncio.sleep(0))
    waiting.result(60)
    loop.submit(end_thread())
    loop._thread.join(60)
    loop._closed = False
    with pytest.raises(EventLoopLost, match="has ended"):
        loop.run(doubled(1), timeout_s=60)
    loop.close()


def test_a_wait_that_ends_names_what_it_waited_for(loop: EventLoopThread) -> None:
    release = threading.Event()

    async def blocks() -> None:
        release.wait(30)

    try:
        with pytest.raises(WaitTimedOut, match=r"waited 0.05 s for .*blocks, which did not end"):
            loop.run(blocks(), timeout_s=0.05)
    finally:
        release.set()


def test_close_ends_though_a_task_swallows_its_cancellation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("async_rl.shared.event_loop.CLOSE_TIMEOUT_S", 0.5)
    loop = EventLoopThread()
    started, release = threading.Event(), threading.Event()

    async def stay() -> None:
        while not release.is_set():
            try:
                started.set()
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass

    loop.submit(stay())
    assert started.wait(60)
    loop.close()
    assert not loop._thread.is_alive()
    assert "did not end when it was cancelled" in caplog.text and "stay" in caplog.text
    release.set()


def test_timers_are_not_late_for_hundreds_of_sockets_that_are_ready_at_once(loop: EventLoopThread) -> None:
    """Each takes three milliseconds, together more than a second; each is served once, one closed meanwhile is not."""
    pairs = [socket.socketpair() for _ in range(400)]

    async def serve() -> tuple[float, list[int]]:
        own = asyncio.get_running_loop()
        served: list[int] = []

        def read(number: int) -> None:
            pairs[number][0].recv(1)
            time.sleep(0.003)
            served.append(number)
            if number == 0:
                own.remove_reader(pairs[399][0])

        for number, (ours, theirs) in enumerate(pairs):
            theirs.send(b"x")
            own.add_reader(ours, read, number)
        longest_s, before_s = 0.0, time.monotonic()
        while len(served) < 399:
            await asyncio.sleep(0.001)
            longest_s, before_s = max(longest_s, time.monotonic() - before_s), time.monotonic()
        await asyncio.sleep(0.01)
        for ours, _ in pairs:
            own.remove_reader(ours)
        return longest_s, served

    longest_s, served = loop.run(serve())
    assert sorted(served) == list(range(399)) and longest_s < 0.6
    for pair in pairs:
        for each in pair:
            each.close()


def test_sockets_that_are_always_ready_leave_others_their_turn(loop: EventLoopThread) -> None:
    pairs = [socket.socketpair() for _ in range(40)]

    async def serve() -> set[int]:
        own = asyncio.get_running_loop()
        served: set[int] = set()
        for number, (ours, theirs) in enumerate(pairs):
            theirs.send(b"x")  # Nobody reads it.
            own.add_reader(ours, served.add, number)
        for _ in range(6):
            await asyncio.sleep(0)
        for ours, _ in pairs:
            own.remove_reader(ours)
        return served

    assert loop.run(serve()) == set(range(40))
    for pair in pairs:
        for each in pair:
            each.close()
