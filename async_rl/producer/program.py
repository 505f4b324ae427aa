"""The producer of one trainer, from its address to the end of its main rank's connection."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from async_rl.config.sections import Config
from async_rl.producer.process import Given
from async_rl.producer.server import ControlLink, ProducerServer
from async_rl.producer.service import ProducerService
from async_rl.records.notices import recorded_notices
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.locks.lease import lease_of
from async_rl.shared.net.listener import listen

CONTROL_TIMEOUT_S = 60.0
"""The main rank connects right after it has read the port."""

CALLS = frozenset({"rest", "load", "open", "write_groups", "end_iteration", "members", "evaluate_trained"})


def serve(given: Given, say_port: Callable[[int], None], pool: InferencePool | None = None) -> None:
    """Serves the ranks of one trainer until its main rank leaves.

    Args:
        say_port: gets the port, once it listens there.
        pool: by default made from the config.
    """
    config = Config.model_validate_json(given.config)
    lease = lease_of(config.run.dir, given.lease_name)
    with ExitStack() as closing:
        closing.enter_context(recorded_notices(config.run.dir))
        loop = EventLoopThread()
        closing.callback(loop.close)
        service = ProducerService(
            closing,
            config,
            loop,
            token=os.environ.get("ASYNC_RL_TOKEN"),
            lease_name=given.lease_name,
            run=given.lease_name.partition(":")[0],
            require_lease=lease.require,
            pool=pool,
        )
        server = ProducerServer(given.secret, service.start_batch)
        listener = listen("the producer", given.host, 0, None)
        loop.run(server.start(listener))
        say_port(listener.getsockname()[1])
        link = server.control.get(timeout=CONTROL_TIMEOUT_S)
        link.serve(partial(_carry_out, service, link))
        # Before what the rollouts use.
        loop.run_closing(server.stop())


def _carry_out(service: ProducerService, link: ControlLink, name: str, arguments: list[Any]) -> Any:
    if name == "publish":
        (version,) = arguments
        return service.publish(version, link.ask)
    assert name in CALLS, f"the main rank asks for {name!r}"
    return getattr(service, name)(*arguments)
