"""Pools of scripted instances, driven from the test's thread; the fixture `pools_with` creates and closes them."""

from collections.abc import Callable
from typing import Any

from async_rl.config.pool_section import PoolSection
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.pool.member import Member
from async_rl.shared.event_loop import EventLoopThread
from tests.support.waiting import wait_for

DEADLINE_S = 60.0


class Pools:
    """Creates pools with these `settings` of `PoolSection`, unless overridden."""

    def __init__(self, loop: EventLoopThread, **settings: Any) -> None:
        self.loop = loop
        self.made: list[InferencePool] = []
        self._settings = settings

    def make(self, *instances: Any, version: str | None = "v1", **options: Any) -> InferencePool:
        """A pool of instances, or of URLs, in service with `version`; None puts no instance in service."""
        urls = tuple(instance if isinstance(instance, str) else instance.url for instance in instances)
        pool = InferencePool(
            PoolSection(instances=urls, **({"fleet_address": "127.0.0.1:1"} | self._settings | options))
        )
        self.made.append(pool)
        if version is not None:
            self.loop.run(pool.wait_until_ready())
            self.publish(pool, version, *urls)
        return pool

    def publish(self, pool: InferencePool, version: str, *urls: str) -> list[Member]:
        members = self.loop.run(pool.begin_publish())
        self.loop.run(pool.end_publish(version, urls))
        return members

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `method` on the event loop, where pools may be changed."""

        async def on_loop() -> Any:
            return method(*arguments)

        return self.loop.run(on_loop())

    def wait_for(self, condition: Callable[[], bool]) -> None:
        wait_for(condition)

    def close(self) -> None:
        for pool in self.made:
            self.loop.run(pool.close())
