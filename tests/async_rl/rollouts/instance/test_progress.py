"""How long a request is waited for: as long as tokens come, its own or, before its first one, those of others."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from async_rl.errors import InstanceStalled, InstanceTooSlow
from async_rl.rollouts.instance.client import InstanceClient
from async_rl.rollouts.instance.connections import Connections
from async_rl.rollouts.instance.dialect import EMBEDDED
from async_rl.rollouts.instance.partial_rollout import PartialRollout
from async_rl.rollouts.instance.response_stream import ResponseStream
from async_rl.shared.protocol.inference import SamplingParams
from tests.support import virtual_time

TIMEOUT_S = 60.0
SAMPLING = SamplingParams(n=1, max_tokens=8, seed=0, logprobs=0)

Answer = Callable[[Callable[[int], None]], Awaitable[None]]
"""Sends its tokens by a function that takes how many there are by then."""


def client_of(*answers: Answer) -> InstanceClient:
    """A client whose requests get these answers, in their order; no connection is made."""
    client = InstanceClient(Connections(), "http://a:1", TIMEOUT_S)
    client._dialect = EMBEDDED
    left = list(answers)

    async def read(path: str, body: Any, stream: ResponseStream) -> None:
        await left.pop(0)(lambda end: client._feed(stream, _event(end)))

    client._read = read  # type: ignore[method-assign]
    return client


def _event(end: int) -> bytes:
    choice = {
        "index": 0,
        "finish_reason": "length" if end == SAMPLING.max_tokens else None,
        "token_ids": [5],
        "logprobs": {"content": [{"logprob": -1.0}]},
        "weight_versions": [{"version": "v1", "start": 0, "end": end}],
    }
    return json.dumps({"choices": [choice]}).encode()


async def generate(client: InstanceClient) -> PartialRollout:
    partial = PartialRollout(0)
    await client.generate((3,), SAMPLING, "v1-0", "v1", [partial])
    return partial


async def slowly(send: Callable[[int], None]) -> None:
    """Each token a second before it is given up."""
    for end in range(1, SAMPLING.max_tokens + 1):
        await asyncio.sleep(TIMEOUT_S - 1.0)
        send(end)


async def two_tokens(send: Callable[[int], None]) -> None:
    send(1)
    send(2)
    await asyncio.Event().wait()


async def nothing(send: Callable[[int], None]) -> None:
    await asyncio.Event().wait()


def test_a_response_may_take_any_time_as_long_as_its_tokens_come() -> None:
    partial = virtual_time.run(generate(client_of(slowly)))
    assert len(partial.token_ids) == SAMPLING.max_tokens


@pytest.mark.parametrize("answer", [nothing, two_tokens])
def test_one_that_makes_no_more_tokens_is_told_from_one_that_is_slow(answer: Answer) -> None:
    with pytest.raises(InstanceStalled, match="made no token of a request for 60 s, nor of any other"):
        virtual_time.run(generate(client_of(answer)))


def test_a_request_that_waits_behind_others_waits_for_as_long_as_these_go_on() -> None:
    async def scenario() -> None:
        client = client_of(nothing, slowly, slowly)
        waiting = asyncio.create_task(generate(client))
        await asyncio.sleep(0)
        for _ in range(2):
            await generate(client)
            assert not waiting.done()
        with pytest.raises(InstanceStalled):
            await waiting

    virtual_time.run(scenario())


def test_a_request_that_stands_still_while_others_go_on_is_slow_and_its_instance_not_gone() -> None:
    async def scenario() -> None:
        client = client_of(two_tokens, slowly)
        entry = asyncio.create_task(generate(client))
        await asyncio.sleep(0)
        await generate(client)
        with pytest.raises(InstanceTooSlow, match="made no token of a request for 60 s, after 2 of it"):
            await entry

    virtual_time.run(scenario())
