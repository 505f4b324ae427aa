"""Membership by DNS: every address of one host name is an instance, as in Kubernetes' headless services."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection

from async_rl.config.texts import without_brackets
from async_rl.errors import ConfigError
from async_rl.rollouts.fleet.orders import Orders
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.shared.net.http_client import http_url
from async_rl.shared.net.local_address import addresses_of


class Periodic:
    """Runs `once`, waits `interval_s`, and repeats. `once` handles its own faults; an exception ends the task."""

    def __init__(self, once: Callable[[], Awaitable[None]], interval_s: float) -> None:
        self._once = once
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        assert self._task is None, "it runs already"
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(_report)

    async def stop(self) -> None:
        """Cancels the running task and waits until it has ended; does nothing if it was not started."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _run(self) -> None:
        while True:
            await self._once()
            await asyncio.sleep(self._interval_s)


def _report(task: "asyncio.Task[None]") -> None:
    """Logs the task's error, since no code awaits the task."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a background task of the inference pool ended", exc_info=error)


logger = logging.getLogger(__name__)

RESOLVE_INTERVAL_S = 5.0

Resolve = Callable[[str, int], Awaitable[Collection[str]]]
"""Host and port -> IP addresses; raises OSError if the lookup fails."""


async def resolve_addresses(host: str, port: int) -> set[str]:
    """The A and AAAA records of a host, as the system resolves it.

    Raises:
        OSError: it does not, or the name can be none.
    """
    found = await asyncio.to_thread(addresses_of, host, port, socket.SOCK_STREAM)
    return {str(address[0]) for *_, address in found}


class DnsMembership:
    """Adds the instances behind a name to the pool as they appear, and drains those that disappear from it.

    Instances added by other means are left alone. One that was removed or drained by hand stays out for as long as the
    name has its address. A lookup that fails or is empty changes nothing: a fault of the name service is more likely
    than the loss of every instance, and lost instances are detected by their health checks.

    Args:
        name: of `pool.instances`, as HOST:PORT.
        resolve: the lookup function; tests may replace it.
        interval_s: from one lookup to the next.
        orders: what was removed or drained by hand, by this producer or one before it; by default nothing.
    """

    def __init__(
        self,
        pool: InferencePool,
        name: str,
        resolve: Resolve = resolve_addresses,
        interval_s: float = RESOLVE_INTERVAL_S,
        orders: Orders | None = None,
    ) -> None:
        self._pool = pool
        self._orders = orders or Orders(pool)
        host, _, port = name.rpartition(":")
        self._host, self._port = without_brackets(host), int(port)
        self._resolve = resolve
        self._listed: set[str] = set()
        """URLs present at the last lookup and added then or before."""
        self._failed = False
        self._periodic = Periodic(self.refresh, interval_s)

    async def start(self) -> None:
        """Looks the name up once, so that a run starts with the present instances, and again every few seconds."""
        await self.refresh()
        await self._periodic.start()

    async def stop(self) -> None:
        await self._periodic.stop()

    async def refresh(self) -> None:
        """One lookup, and the resulting changes."""
        try:
            addresses = await self._resolve(self._host, self._port)
        except OSError as error:
            self._warn_once(str(error))
            return
        if not addresses:
            self._warn_once("it has no address")
            return
        self._failed = False
        urls = {http_url(address, self._port) for address in addresses}
        for url in sorted(self._listed - urls):
            self._leave(url)
        for url in sorted(urls - self._listed):
            self._join(url)

    def _join(self, url: str) -> None:
        if self._orders.has_left(url):
            self._listed.add(url)
            return
        member = next((member for member in self._pool.members if member.url == url), None)
        if member is None:
            try:
                self._pool.add(url)
            except ConfigError as error:
                logger.warning("%s is not added: %s", url, error)
            else:
                logger.info("%s joins the pool: %s has its address", url, self._host)
        # One that returned while it drains still has to leave first: it is added again at a later lookup.
        if member is None or member.state != "draining":
            self._listed.add(url)

    def _leave(self, url: str) -> None:
        self._listed.discard(url)
        self._orders.forget(url)
        if any(member.url == url for member in self._pool.members):
            logger.info("%s is drained: %s does not have its address any more", url, self._host)
            self._pool.drain(url)

    def _warn_once(self, why: str) -> None:
        if not self._failed:
            logger.warning(
                "the lookup of %s (pool.instances) failed, the instances stay as they are: %s", self._host, why
            )
        self._failed = True
