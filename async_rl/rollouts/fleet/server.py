"""Serves the fleet endpoint on the producer's event loop, and writes its address to the run's directory."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from async_rl.config.pool_section import PoolSection
from async_rl.rollouts.fleet.app import make_app
from async_rl.rollouts.fleet.metrics import FleetMetrics
from async_rl.rollouts.fleet.orders import Orders
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.shared.files import write_file
from async_rl.shared.net.bounded_connections import ACCEPTS, BACKLOG
from async_rl.shared.net.bounded_http import BoundedHttp
from async_rl.shared.net.listener import is_open_to_network, listen, url_for_others
from async_rl.shared.protocol.fleet import ADDRESS_FILE, FleetAddress

logger = logging.getLogger(__name__)

START_POLL_S = 0.01
CLOSE_CONNECTIONS_S = 1
"""How long a stopping server waits for running responses."""


class FleetServer:
    """Start and stop of the endpoint; both run on the pool's event loop.

    Args:
        run_dir: where the address is written, and the records that the dashboard shows are; None writes no file, and
            has no dashboard.
        address: at which other hosts reach this one, if `pool.fleet_address` means all its interfaces; None determines
            one.
        run: the run's uid: requests for another run are refused.
        orders: carries out what operators want; by default none is kept.
    """

    def __init__(
        self,
        pool: InferencePool,
        config: PoolSection,
        token: str | None = None,
        run_dir: Path | None = None,
        address: str | None = None,
        run: str | None = None,
        orders: Orders | None = None,
    ) -> None:
        self.metrics = FleetMetrics(lambda: pool.members)
        """The content of /metrics; its `record_iteration` takes the records of the run."""
        self.url = ""
        self.port = 0
        """The endpoint's URL and port; known after `start`."""
        self._app = make_app(pool, orders or Orders(pool), self.metrics, token, run, run_dir)
        self._config = config
        self._has_token = token is not None
        self._run = run
        self._address_file = run_dir / ADDRESS_FILE if run_dir else None
        self._address = address
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listens, and returns when requests are accepted.

        Raises:
            ConfigError: the address or the port cannot be used.
        """
        listener = listen("the fleet endpoint", self._config.fleet_host, self._config.fleet_port, "pool.fleet_address")
        self.url, self.port = url_for_others(listener, self._address), listener.getsockname()[1]
        if is_open_to_network(listener):
            _warn(self.url, self._has_token)
        config = uvicorn.Config(
            self._app,
            http=BoundedHttp,
            backlog=ACCEPTS,
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            timeout_graceful_shutdown=CLOSE_CONNECTIONS_S,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([listener]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(START_POLL_S)
        assert self._server.started, "a server on an open socket starts"
        listener.listen(BACKLOG)
        if self._address_file is not None:
            write_file(self._address_file, self._address_line())
        logger.info("the fleet endpoint listens at %s", self.url)

    async def stop(self) -> None:
        """Ends the server and removes its address file, unless the trainer that took over has written it since; does
        nothing if it was not started."""
        if self._server is None or self._serving is None:
            return
        if self._address_file is not None and self._is_own(self._address_file):
            self._address_file.unlink(missing_ok=True)
        self._server.should_exit = True
        await self._serving
        self._server = self._serving = None

    def _address_line(self) -> str:
        return FleetAddress(url=self.url, run=self._run).model_dump_json(exclude_none=True) + "\n"

    def _is_own(self, address_file: Path) -> bool:
        try:
            return address_file.read_text() == self._address_line()
        except OSError:
            return False


class _Server(uvicorn.Server):
    """A server that leaves signal handling to the program it runs in."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _warn(url: str, has_token: bool) -> None:
    if has_token:
        risk = "the token travels unencrypted: keep the network private"
    else:
        risk = (
            "WITHOUT A TOKEN: whoever reaches it can send this run's prompts to an instance of their own and have "
            "it train on the answers; set ASYNC_RL_TOKEN"
        )
    logger.warning("the fleet endpoint at %s is open to the network; %s", url, risk)
