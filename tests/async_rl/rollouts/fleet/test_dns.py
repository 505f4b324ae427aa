import asyncio
import logging
from collections.abc import Collection
from typing import Any

import pytest

from async_rl.rollouts.fleet.dns import DnsMembership, resolve_addresses
from async_rl.rollouts.pool.inference_pool import InferencePool


class NameService:
    """Answers with `addresses`, or fails with them."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: Collection[str] | OSError = addresses
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, host: str, port: int) -> Collection[str]:
        self.asked.append((host, port))
        if isinstance(self.addresses, OSError):
            raise self.addresses
        return self.addresses


def states(pool: InferencePool) -> dict[str, str]:
    return {member.url: member.state for member in pool.members}


def test_every_address_is_an_instance(make_pool, loop) -> None:
    pool, names = make_pool(), NameService("10.0.0.1", "fd00::2")
    loop.run(DnsMembership(pool, "inference.svc:8000", names).refresh())
    assert states(pool) == {"http://10.0.0.1:8000": "joining", "http://[fd00::2]:8000": "joining"}
    assert names.asked == [("inference.svc", 8000)]


def test_new_addresses_are_added_and_vanished_ones_drained(make_pool, loop) -> None:
    pool, names = make_pool(), NameService("10.0.0.1", "10.0.0.2")
    dns = DnsMembership(pool, "inference.svc:8000", names)
    loop.run(dns.refresh())
    names.addresses = ("10.0.0.2", "10.0.0.3")
    loop.run(dns.refresh())
    assert states(pool) == {
        "http://10.0.0.1:8000": "draining",
        "http://10.0.0.2:8000": "joining",
        "http://10.0.0.3:8000": "joining",
    }


def test_a_name_that_can_be_none_is_a_failed_lookup(make_pool, loop, caplog) -> None:
    pool = make_pool("http://10.0.0.1:8000")
    loop.run(DnsMembership(pool, "inference..svc:8000").refresh())
    assert states(pool) == {"http://10.0.0.1:8000": "joining"} and "the lookup of inference..svc" in caplog.text


@pytest.mark.parametrize("answer", [OSError("no such host"), ()])
def test_a_lookup_that_fails_changes_nothing_and_is_logged_once(make_pool, loop, caplog, answer: Any) -> None:
    pool, names = make_pool(), NameService("10.0.0.1")
    dns = DnsMembership(pool, "inference.svc:8000", names)
    loop.run(dns.refresh())
    names.addresses = answer
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            loop.run(dns.refresh())
    assert states(pool) == {"http://10.0.0.1:8000": "joining"}
    assert caplog.text.count("the lookup of inference.svc (pool.instances) failed") == 1
    names.addresses = ("10.0.0.2",)
    loop.run(dns.refresh())
    assert states(pool) == {"http://10.0.0.1:8000": "draining", "http://10.0.0.2:8000": "joining"}


def test_instances_of_others_are_left_alone(make_pool, loop) -> None:
    pool, names = make_pool("http://10.0.0.9:8000"), NameService("10.0.0.1")
    dns = DnsMembership(pool, "inference.svc:8000", names)
    for names.addresses in (("10.0.0.1",), ("10.0.0.2",)):
        loop.run(dns.refresh())
    assert states(pool)["http://10.0.0.9:8000"] == "joining"


def test_an_instance_removed_by_hand_stays_away_until_its_address_was_gone(make_pool, loop) -> None:
    pool, names = make_pool(), NameService("10.0.0.1", "10.0.0.2")
    dns = DnsMembership(pool, "inference.svc:8000", names)
    loop.run(dns.refresh())
    pool.remove("http://10.0.0.1:8000")
    loop.run(dns.refresh())
    assert list(states(pool)) == ["http://10.0.0.2:8000"]
    for names.addresses in (("10.0.0.2",), ("10.0.0.1", "10.0.0.2")):
        loop.run(dns.refresh())
    assert sorted(states(pool)) == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]


def test_an_address_that_comes_back_while_its_instance_drains_is_added_after_that(make_pool, loop) -> None:
    pool, names = make_pool(), NameService("10.0.0.1", "10.0.0.2")
    dns = DnsMembership(pool, "inference.svc:8000", names)
    loop.run(dns.refresh())
    for names.addresses in (("10.0.0.2",), ("10.0.0.1", "10.0.0.2")):
        loop.run(dns.refresh())
    assert states(pool)["http://10.0.0.1:8000"] == "draining"
    pool.remove("http://10.0.0.1:8000")
    loop.run(dns.refresh())
    assert states(pool)["http://10.0.0.1:8000"] == "joining"


def test_the_first_lookup_is_done_when_start_returns_and_others_follow(make_pool, loop, eventually) -> None:
    pool, names = make_pool(), NameService("10.0.0.1")
    dns = DnsMembership(pool, "inference.svc:8000", names, interval_s=0.02)
    loop.run(dns.start())
    assert list(states(pool)) == ["http://10.0.0.1:8000"]
    names.addresses = ("10.0.0.1", "10.0.0.2")
    eventually(lambda: len(pool.members) == 2)
    assert loop.run(num_periodic()) == 1
    loop.run(dns.stop())
    assert loop.run(num_periodic()) == 0


async def num_periodic() -> int:
    """How many coroutines the loop repeats."""
    return sum("Periodic" in repr(task.get_coro()) for task in asyncio.all_tasks())


def test_addresses_come_from_the_systems_resolver(loop) -> None:
    assert loop.run(resolve_addresses("127.0.0.1", 80)) == {"127.0.0.1"}
    with pytest.raises(OSError):
        loop.run(resolve_addresses("no-such-host.invalid", 80))
