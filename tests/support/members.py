"""Members of a pool whose instances need not be there: for tests of what the pool decides."""

from typing import Any

from async_rl.rollouts.instance.client import InstanceClient
from async_rl.rollouts.instance.connections import Connections
from async_rl.rollouts.pool.member import Member
from async_rl.rollouts.pool.membership import InstanceEntry, Membership


def ready_member(name: str, version: str = "v1", concurrency: int | None = None, **figures: Any) -> Member:
    """In service with `version`; nothing is sent to it."""
    entry = InstanceEntry(f"http://{name}:1")
    Membership().end_publish(version, [entry], {entry.url: None})
    client = InstanceClient(Connections(), entry.url, 60.0)
    client.max_concurrency = concurrency
    return Member(name, client, entry, **figures)
