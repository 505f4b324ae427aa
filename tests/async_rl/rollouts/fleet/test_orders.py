"""What was added, drained and removed by hand, when another producer takes the place of a lost one."""

import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from threading import Timer

import pytest

from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.producer import service as service_module
from async_rl.producer.service import ProducerService
from async_rl.rollouts.fleet.orders import ORDERS_FILE, Orders
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.shared.event_loop import EventLoopThread
from tests.support.minimal_config import minimal_tree

A, B, C = (f"http://10.0.0.{number}:8000" for number in (1, 2, 3))
LEASE = "run:1"


@pytest.fixture
def ordered(make_pool: Callable[..., InferencePool], loop: EventLoopThread, tmp_path: Path) -> Path:
    """Where the orders of a producer that is gone are: A and a registered one have left, B and C came, C left again."""

    async def give() -> None:
        pool = make_pool(A)
        orders = Orders(pool, tmp_path / ORDERS_FILE, LEASE)
        pool.register("http://10.0.0.9:8000", "registered", "boot-9")
        orders.add(B, "mine")
        orders.add(C, "passing")
        orders.drain("passing")
        orders.remove("10.0.0.1:8000")
        orders.drain("registered")

    loop.run(give())
    return tmp_path / ORDERS_FILE


def after(pool: InferencePool, path: Path, lease: str, loop: EventLoopThread) -> dict[str, str]:
    """The members of a new producer's pool, names by URL."""

    async def repeat() -> None:
        Orders(pool, path, lease).repeat()

    loop.run(repeat())
    return {member.url: member.name for member in pool.members}


def test_another_producer_of_the_trainer_repeats_them(ordered: Path, make_pool, loop: EventLoopThread) -> None:
    pool = make_pool(A)
    assert after(pool, ordered, LEASE, loop) == {B: "mine"}

    async def return_of(boot_id: str) -> bool:
        return pool.register("http://10.0.0.9:8000", "registered", boot_id) is not None

    assert not loop.run(return_of("boot-9")) and loop.run(return_of("boot-10"))


def test_another_trainer_does_not(ordered: Path, make_pool, loop: EventLoopThread) -> None:
    assert after(make_pool(A), ordered, "run:2", loop) == {A: "10.0.0.1:8000"}


def test_what_was_removed_and_added_again_is_there(ordered: Path, make_pool, loop: EventLoopThread) -> None:
    async def add_again() -> None:
        orders = Orders(make_pool(), ordered, LEASE)
        orders.repeat()
        orders.add(A, None)

    loop.run(add_again())
    assert set(after(make_pool(A), ordered, LEASE, loop)) == {A, B}


def test_one_that_cannot_be_kept_is_carried_out(
    make_pool, loop: EventLoopThread, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def add() -> str:
        return Orders(make_pool(A), tmp_path / "none" / ORDERS_FILE, LEASE).add(B, "mine").url

    assert loop.run(add()) == B
    assert "is not kept for a producer that takes the place" in caplog.text


@pytest.mark.parametrize(("configured", "waits"), [(0, False), (0, True), (1, False)])
def test_the_fleet_endpoint_of_another_producer_waits_for_its_port(
    configured: int,
    waits: bool,
    make_pool,
    loop: EventLoopThread,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody has it: for a moment, or for good, and then another one serves where the config names none."""
    monkeypatch.setattr(service_module, "PORT_PATIENCE_S", 30.0 if waits else 0.3)
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    tree = minimal_tree() | {"pool": {"instances": [A], "fleet_address": f"127.0.0.1:{port if configured else 0}"}}
    tree["run"]["dir"] = str(tmp_path)
    pool = make_pool(A)
    with ExitStack() as closing, taken:
        service = ProducerService(closing, Config.model_validate(tree), loop, pool=pool)
        if configured:
            with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} \(pool\.fleet_address\)"):
                service._start_fleet(Orders(pool), port)
            return
        if waits:
            Timer(0.5, taken.close).start()
        server = service._start_fleet(Orders(pool), port)
        assert (server.port == port) == waits
