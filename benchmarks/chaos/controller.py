"""Injects seeded faults into a run's pool, one after the other; replaces lost instances, as an operator would."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator

from async_rl.errors import AsyncRLError
from async_rl.rollouts.fleet.endpoint import FleetClient
from async_rl.shared.protocol.fleet import FleetInfo, NameRequest
from async_rl.shared.protocol.routes import FLEET_DRAIN, FLEET_REMOVE
from benchmarks.chaos.fault_log import FaultLog
from benchmarks.chaos.instances import Crew, Instance

GAP_S = (0.3, 1.2)
"""Seconds from one fault to the next."""
SHORT_S = (0.3, 5.0)
"""How long a stall, cut, silence or slowdown lasts: some shorter, some longer than the trainer's timeouts."""
OUTAGE_S = (2.0, 4.0)
SLOWDOWN = 6.0
NUM_INSTANCES = 3
MAX_INSTANCES = 5
PATIENCE_S = 1.5
"""How long the operator tolerates a fleet without an instance in service."""
OPERATOR_INTERVAL_S = 0.3

DECK = (
    *["kill"] * 4,
    *["kill in publish"] * 2,
    *["quick restart"] * 2,
    *["stall"] * 3,
    "stall in publish",
    *["slow"] * 2,
    *["cut"] * 2,
    "silence",
    *["drain"] * 2,
    "remove",
    "join",
)
"""Faults are drawn from this list, shuffled again after each pass: every kind occurs regularly."""


class Controller:
    """Acts on `crew` until it is cancelled.

    Args:
        progress: the share of the run's iterations that are done.
        outages: at which progress no instance is left for some seconds.
    """

    def __init__(
        self,
        crew: Crew,
        fleet: FleetClient,
        draw: random.Random,
        log: FaultLog,
        progress: Callable[[], float],
        outages: tuple[float, ...],
    ) -> None:
        self._crew = crew
        self._fleet = fleet
        self._draw = draw
        self._log = log
        self._progress = progress
        self._outages = list(outages)
        self._is_outage = False
        self._mending: set[asyncio.Task[None]] = set()

    async def injure(self) -> None:
        """One fault after the other, from the first publish on, until it is cancelled."""
        while (info := await self._info()) is None or info.version is None:
            await asyncio.sleep(OPERATOR_INTERVAL_S)
        for kind in self._deal():
            await asyncio.sleep(self._draw.uniform(*GAP_S))
            if self._outages and self._progress() >= self._outages[0]:
                self._outages.pop(0)
                await self._have_outage()
            if kind == "join":
                await self._join()
                continue
            whole = [each for each in self._crew.instances if each.is_running and not each.is_hurt]
            victim = self._draw.choice(whole) if whole else None
            if victim is not None and await self._has_another(victim):
                await self._hurt(kind, victim)

    async def _has_another(self, victim: Instance) -> bool:
        """Whether another instance is in service: otherwise faults would come faster than starts on a slow machine, and
        only show that no instance can work then. Having no instance at all is tested by the outages."""
        info = await self._info()
        return info is not None and any(
            member.state == "ready" and member.name != victim.name for member in info.instances
        )

    async def operate(self) -> None:
        """Keeps the fleet alive, until it is cancelled: starts instances, and removes unusable ones."""
        for _ in range(NUM_INSTANCES):
            await self._crew.add()
        without_s = 0.0
        while True:
            await asyncio.sleep(OPERATOR_INTERVAL_S)
            if self._is_outage:
                continue
            for instance in [each for each in self._crew.instances if not each.is_running and not each.is_hurt]:
                await self._crew.remove(instance)
            if (info := await self._info()) is None:
                continue
            has_one = info.version is None or any(member.state == "ready" for member in info.instances)
            without_s = 0.0 if has_one else without_s + OPERATOR_INTERVAL_S
            if len(self._crew.instances) < NUM_INSTANCES:
                await self._join()
            elif without_s > PATIENCE_S:
                without_s = 0.0
                if len(self._crew.instances) >= MAX_INSTANCES:
                    await self._retire(self._crew.instances[0])
                await self._join()

    async def close(self) -> None:
        """Cancels the pending repairs."""
        for task in self._mending:
            task.cancel()
        await asyncio.gather(*self._mending, return_exceptions=True)

    def _deal(self) -> Iterator[str]:
        while True:
            yield from self._draw.sample(DECK, len(DECK))

    async def _hurt(self, kind: str, instance: Instance) -> None:
        proxy = instance.proxy
        if kind == "kill":
            self._kill(instance)
        elif kind == "kill in publish":
            proxy.on_weights = lambda: self._kill(instance)
        elif kind == "quick restart":
            self._restart(instance)
        elif kind == "stall":
            self._stall(instance)
        elif kind == "stall in publish":
            proxy.on_weights = lambda: self._stall(instance)
        elif kind == "drain":
            await self._ask(FLEET_DRAIN, instance)
            self._log.note("drain")
        elif kind == "remove":
            await self._retire(instance)
            self._log.note("remove")
        else:
            self._disturb(kind, instance)

    def _kill(self, instance: Instance) -> None:
        """`kill -9`; it may be started again later, possibly behind a proxy that reports that it kept its weights."""
        self._log.note("kill")
        instance.kill()
        if self._draw.random() < 0.25:
            return  # permanently: the operator replaces it
        lies = self._draw.random() < 0.5

        async def start_again() -> None:
            instance.proxy.lies_about_version = lies
            instance.start()
            self._log.note("restart")

        self._mend(instance, SHORT_S, start_again)

    def _restart(self, instance: Instance) -> None:
        """Starts another process at the same URL before any client can have noticed that the first one ended."""
        self._log.note("quick restart")
        instance.kill()
        instance.start()

    def _stall(self, instance: Instance) -> None:
        self._log.note("stall")
        instance.stall()

        async def resume() -> None:
            instance.resume()

        self._mend(instance, SHORT_S, resume)

    def _disturb(self, kind: str, instance: Instance) -> None:
        self._log.note(kind)
        if kind == "cut":
            instance.proxy.cut()
        elif kind == "silence":
            instance.proxy.silence()
        else:
            instance.proxy.slowdown = SLOWDOWN

        async def restore() -> None:
            instance.proxy.restore()

        self._mend(instance, SHORT_S, restore)

    async def _have_outage(self) -> None:
        """Takes all instances away at once, by kills and stalls, and restores them."""
        self._is_outage = True
        self._log.note("outage")
        for number, instance in enumerate(self._crew.instances):
            if instance.is_hurt or not instance.is_running:
                continue
            (self._kill, self._stall)[number % 2](instance)
        await asyncio.sleep(self._draw.uniform(*OUTAGE_S))
        self._is_outage = False

    def _mend(self, instance: Instance, span_s: tuple[float, float], mend: Callable[[], Awaitable[None]]) -> None:
        duration_s = self._draw.uniform(*span_s)
        instance.is_hurt = True

        async def wait() -> None:
            await asyncio.sleep(duration_s)
            if instance in self._crew.instances:
                await mend()
            instance.is_hurt = False

        task = asyncio.create_task(wait())
        self._mending.add(task)
        task.add_done_callback(self._mending.discard)

    async def _join(self) -> None:
        if len(self._crew.instances) < MAX_INSTANCES:
            await self._crew.add()
            self._log.note("join")

    async def _retire(self, instance: Instance) -> None:
        """Removes an instance from the fleet at once, and ends it."""
        await self._ask(FLEET_REMOVE, instance)
        if instance in self._crew.instances:
            await self._crew.remove(instance)

    async def _ask(self, path: str, instance: Instance) -> None:
        """A change through the fleet endpoint; the instance may be unknown there, and the run may have ended."""
        try:
            await asyncio.to_thread(self._fleet.post, path, NameRequest(name=instance.name))
        except AsyncRLError:
            return

    async def _info(self) -> FleetInfo | None:
        """The fleet as the trainer sees it; None if the trainer has not started or has ended."""
        try:
            return await asyncio.to_thread(self._fleet.info)
        except AsyncRLError:
            return None
