"""What the watch of a pool makes of instances that say one thing and do another."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from async_rl.event_loop import EventLoopThread
from async_rl.pool.inference_pool import InferencePool

pytestmark = pytest.mark.distributed

DEADLINE_S = 20.0
VERSION = "v1"


def test_an_instance_that_only_sends_heartbeats_is_given_up(
    instances: Callable[..., list[Any]], make_pool: Callable[..., InferencePool], loop: EventLoopThread
) -> None:
    (hanging,) = instances({})
    pool = make_pool(hanging.url, heartbeat_timeout_s=1.0, timeout_s=10.0)

    async def put_in_service() -> None:
        await pool.wait_until_ready()
        await pool.begin_publish()
        await pool.end_publish(VERSION, {hanging.url})

    async def send_heartbeats() -> None:
        while pool.members[0].state == "ready":
            pool.register(hanging.url, "hanging", "1")
            await asyncio.sleep(0.2)

    loop.run(put_in_service())
    os.kill(hanging.process.pid, signal.SIGSTOP)
    try:
        loop.submit(send_heartbeats()).result(DEADLINE_S)
        assert pool.members[0].state == "dead" and "silent for" in (pool.members[0].reason or "")
    finally:
        os.kill(hanging.process.pid, signal.SIGCONT)
