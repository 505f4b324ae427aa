"""How many rollouts of programs are under way at once, in all and in each environment; for `program_rollouts`."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary


class Slots:
    """`per_environment` is None for as many as there are in all."""

    def __init__(self, max_concurrent: int, per_environment: int | None) -> None:
        self._slots = asyncio.Semaphore(max_concurrent)
        self._per_environment = min(per_environment or max_concurrent, max_concurrent)
        self._of_environment: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def taken(self, environment: str) -> AsyncIterator[None]:
        """Waits for a slot of this environment, and then for one of all: who waits for a busy one takes no room."""
        own = self._of_environment.get(environment)
        if own is None:
            own = self._of_environment[environment] = asyncio.Semaphore(self._per_environment)
        async with own, self._slots:
            yield
