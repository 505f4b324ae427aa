"""Scripted instances in processes of their own, pools and fleet endpoints, and an event loop for all of them."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from async_rl.config.pool_section import PoolSection
from async_rl.rollouts.fleet.server import FleetServer
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.shared.event_loop import EventLoopThread
from tests.support.fleet_endpoint import Endpoint
from tests.support.pools import Pools
from tests.support.scripted_processes import ScriptedInstance, running
from tests.support.waiting import wait_for

# torch's store looks up its peers' names; a name server that drops a question shall not cost 5 s each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture
def instances() -> Iterator[Callable[..., list[ScriptedInstance]]]:
    """`instances({"version": "v1"}, {"die_at": 2})` starts one scripted instance for each script."""
    with ExitStack() as stack:
        yield lambda *scripts: stack.enter_context(running(*scripts, program="scripted_instance"))


@pytest.fixture
def pools_with(loop: EventLoopThread) -> Iterator[Callable[..., Pools]]:
    """`pools_with(timeout_s=1.0)` makes pools with these settings, see there."""
    with ExitStack() as stack:

        def make(**settings: Any) -> Pools:
            pools = Pools(loop, **settings)
            stack.callback(pools.close)
            return pools

        yield make


@pytest.fixture
def start_receivers_once() -> Iterator[Callable[..., list[ScriptedInstance]]]:
    """As `instances`, for instances that take weights."""
    with ExitStack() as stack:
        yield lambda *scripts: stack.enter_context(running(*scripts, program="receiving_instance"))


@pytest.fixture(scope="module")
def start_receivers() -> Iterator[Callable[..., list[ScriptedInstance]]]:
    """As `start_receivers_once`, for instances that all tests of a module share: each imports torch."""
    with ExitStack() as stack:
        yield lambda *scripts: stack.enter_context(running(*scripts, program="receiving_instance"))


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Callable[..., Path]) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model())


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    loop = EventLoopThread()
    yield loop
    loop.close()


@pytest.fixture
def make_pool(loop: EventLoopThread) -> Iterator[Callable[..., InferencePool]]:
    """`make_pool(url, ..., request_timeout_s=1)`; the instances need not be there: nothing watches them yet."""
    pools: list[InferencePool] = []

    def make(*urls: str, **options: Any) -> InferencePool:
        # A pool that starts without instances has to name a source of them.
        instances = urls or ("dns:inference.svc:8000",)
        pool = InferencePool(PoolSection(instances=instances, **({"timeout_s": 1.0} | options)))
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        loop.run(pool.close())


@pytest.fixture
def serve(loop: EventLoopThread) -> Iterator[Callable[..., Endpoint]]:
    """`serve(pool, token="secret", fleet_address=...)` starts an endpoint of the pool."""
    servers: list[FleetServer] = []

    def start(
        pool: InferencePool,
        token: str | None = None,
        run_dir: Path | None = None,
        address: str = "127.0.0.1",
        **options,
    ) -> Endpoint:
        server = FleetServer(pool, PoolSection(**options), token, run_dir, address)
        servers.append(server)
        loop.run(server.start())
        return Endpoint(server, token)

    yield start
    for server in servers:
        loop.run(server.stop())


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    return wait_for
