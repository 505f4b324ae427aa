"""Requests that stream are woken together, within an interval, by any thread, and only where there is news."""

import asyncio
import threading
from collections.abc import Callable, Coroutine

import pytest

from async_rl.shared.protocol.inference import SamplingParams
from inference_service.engine.sequences import Request, Sequence
from inference_service.engine.transformers_engine import INTERVAL_S, StreamWaker
from inference_service.engine_interface import Sample

Scenario = Callable[[StreamWaker, list[Request]], Coroutine[None, None, None]]


def run(scenario: Scenario, num_requests: int = 2) -> None:
    """With requests that stream one sequence each, token by token."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        requests = []
        for seed in range(num_requests):
            sequence = Sequence((1,), SamplingParams(stream_interval=1, max_tokens=9), seed, frozenset(), due_at=1)
            requests.append(Request(f"r{seed}", [sequence], loop.create_future(), asyncio.Event()))
        waker = StreamWaker(requests)
        waker.start(loop)
        await scenario(waker, requests)

    asyncio.run(main())


def sample(request: Request) -> list[Sequence]:
    (sequence,) = request.sequences
    sequence.samples.append(Sample(3, -1.0, 1, (), "v1"))
    return [sequence]


async def woken(request: Request) -> None:
    assert request.delta_ready is not None
    # Long against the interval: only a wake-up that never comes takes so much.
    await asyncio.wait_for(request.delta_ready.wait(), 400 * INTERVAL_S)


def is_woken(request: Request) -> bool:
    assert request.delta_ready is not None
    return request.delta_ready.is_set()


def test_a_step_in_another_thread_wakes_who_has_news_and_nobody_else() -> None:
    async def scenario(waker: StreamWaker, requests: list[Request]) -> None:
        thread = threading.Thread(target=lambda: waker.note_step(sample(requests[0])))
        thread.start()
        await woken(requests[0])
        thread.join()
        assert not is_woken(requests[1])

    run(scenario)


def test_steps_within_an_interval_wake_all_at_once_and_not_before_it_is_over() -> None:
    async def scenario(waker: StreamWaker, requests: list[Request]) -> None:
        begun = asyncio.get_running_loop().time()
        for request in requests:
            waker.note_step(sample(request))
        await woken(requests[0])
        assert is_woken(requests[1])
        # The loop's clock is read once a turn.
        assert asyncio.get_running_loop().time() - begun > INTERVAL_S - 0.005

    run(scenario)


def test_what_comes_after_a_wake_up_rings_again() -> None:
    async def scenario(waker: StreamWaker, requests: list[Request]) -> None:
        (request,) = requests
        for _ in range(3):
            waker.note_step(sample(request))
            await woken(request)
            assert request.delta_ready is not None
            request.delta_ready.clear()
            assert len(request.take_delta()[0].samples) == 1

    run(scenario, num_requests=1)


def test_a_step_without_news_does_not_ring() -> None:
    async def scenario(waker: StreamWaker, requests: list[Request]) -> None:
        (request,) = requests
        sequence = sample(request)
        request.take_delta()
        waker.note_step(sequence)
        await asyncio.sleep(2 * INTERVAL_S)
        assert not is_woken(request)

    run(scenario, num_requests=1)


def test_an_engine_that_was_not_started_cannot_ring() -> None:
    with pytest.raises(AssertionError, match="the engine was not started"):
        StreamWaker([]).ring()
