"""Keeps the pool of one data-parallel leader in step with the main rank's, which alone has the fleet endpoint.

Each pool checks by itself which instances are healthy and which weights they hold; the leaders share the members of
the fleet, which process the main leader has put in service with which version, and each leader's outstanding tokens.
"""

import logging
from collections.abc import Sequence

import aiohttp
from pydantic import ValidationError

from async_rl.errors import ConfigError
from async_rl.fleet.periodic import Periodic
from async_rl.net.http_client import authorization
from async_rl.pool.inference_pool import InferencePool
from async_rl.protocol.fleet import FleetInfo, InstanceInfo, SyncRequest
from async_rl.protocol.routes import FLEET_SYNC

logger = logging.getLogger(__name__)

SYNC_INTERVAL_S = 0.5
TIMEOUT = aiohttp.ClientTimeout(total=5.0)


class FleetFollower:
    """Reports this leader's outstanding tokens to the endpoint, and applies the membership in its response.

    Args:
        pool: this leader's own.
        endpoint_url: of the main rank's endpoint.
        leader: the number of this leader's replica; the main rank's is 0.
    """

    def __init__(self, pool: InferencePool, endpoint_url: str, leader: int, token: str | None = None) -> None:
        self._pool = pool
        self._url = endpoint_url.rstrip("/") + FLEET_SYNC
        self._leader = leader
        self._headers = {"Content-Type": "application/json"} | authorization(token)
        self._session: aiohttp.ClientSession | None = None
        self._failed = False
        self._num_drains = 0
        """Drains that this pool has applied."""
        self._periodic = Periodic(self.sync, SYNC_INTERVAL_S)

    async def start(self) -> None:
        """Applies the present membership, and every half second from then on."""
        await self.sync()
        await self._periodic.start()

    async def stop(self) -> None:
        await self._periodic.stop()
        if self._session is not None:
            await self._session.close()

    async def sync(self) -> None:
        """One report and its response. If the endpoint does not respond, the pool continues with its known members."""
        report = {member.url: member.outstanding_tokens for member in self._pool.members}
        try:
            fleet = await self._post(
                SyncRequest(leader=self._leader, outstanding_tokens=report, num_drains=self._num_drains)
            )
        except (aiohttp.ClientError, TimeoutError, ValidationError) as error:
            self._note_fault(f"{type(error).__name__}: {error}")
            return
        self._failed = False
        self._follow(fleet.instances)
        self._num_drains = fleet.num_drains
        self._take_word(fleet.instances)
        elsewhere = {info.url: info.outstanding_tokens - report.get(info.url, 0) for info in fleet.instances}
        for member in self._pool.members:
            member.outstanding_elsewhere = max(0, elsewhere.get(member.url, 0))

    async def _post(self, request: SyncRequest) -> FleetInfo:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers, timeout=TIMEOUT)
        async with self._session.post(self._url, data=request.model_dump_json()) as answer:
            answer.raise_for_status()
            return FleetInfo.model_validate_json(await answer.read())

    def _follow(self, infos: Sequence[InstanceInfo]) -> None:
        """Removes, drains and adds members until both pools have the same."""
        listed = {(info.name, info.url) for info in infos}
        for member in self._pool.members:
            if (member.name, member.url) not in listed:
                self._pool.remove(member.name)
        mine = {member.url: member for member in self._pool.members}
        for info in infos:
            if info.url not in mine:
                # A draining one gets no requests from here, even if it is still busy for other leaders.
                if info.state != "draining":
                    self._add(info)
            elif info.state == "draining" and mine[info.url].state != "draining":
                self._pool.drain(info.name)

    def _take_word(self, infos: Sequence[InstanceInfo]) -> None:
        """Learns which processes are in service: only the main leader loads weights into instances that join between
        two publishes."""
        mine = {member.url: member for member in self._pool.members}
        for info in infos:
            if info.state == "ready" and info.version is not None and info.boot_id is not None and info.url in mine:
                self._pool.vouch_for(mine[info.url], info.version, info.boot_id)

    def _add(self, info: InstanceInfo) -> None:
        try:
            self._pool.add(info.url, info.name)
        except ConfigError as error:
            logger.warning("%s is not added: %s", info.url, error)

    def _note_fault(self, why: str) -> None:
        if not self._failed:
            logger.warning("the fleet endpoint does not answer, going on with the instances known: %s", why)
        self._failed = True
        # The other leaders' outstanding tokens are not known any more, and must not keep an instance busy forever.
        for member in self._pool.members:
            member.outstanding_elsewhere = 0
