"""What was added, drained and removed by hand, when the run's producer or its trainer is started again."""

import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Timer

import pytest

from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.producer import service as service_module
from async_rl.producer.service import ProducerService
from async_rl.rollouts.fleet.dns import DnsMembership
from async_rl.rollouts.fleet.orders import ORDERS_FILE, Orders
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.shared.event_loop import EventLoopThread
from tests.support.minimal_config import minimal_tree

A, B, C, D = (f"http://10.0.0.{number}:8000" for number in (1, 2, 3, 4))
RUN = "run"
LISTED = (A, D)


@pytest.fixture
def ordered(make_pool: Callable[..., InferencePool], loop: EventLoopThread, tmp_path: Path) -> Path:
    """Where the orders of a producer that is gone are: of the listed ones A has left, and D, which had registered
    itself, as another one; B and C came, C left again."""

    async def give() -> None:
        pool = make_pool(*LISTED)
        orders = Orders(pool, tmp_path / ORDERS_FILE, RUN, LISTED)
        pool.register("http://10.0.0.9:8000", "registered", "boot-9")
        pool.register(D, "of a name of its own", "boot-4")
        orders.add(B, "mine")
        orders.add(C, "passing")
        orders.drain("passing")
        orders.remove("10.0.0.1:8000")
        orders.drain("registered")
        orders.drain("of a name of its own")

    loop.run(give())
    return tmp_path / ORDERS_FILE


def after(
    pool: InferencePool, path: Path, loop: EventLoopThread, run: str = RUN, listed: Sequence[str] = LISTED
) -> dict[str, str]:
    """The members of a new producer's pool, names by URL."""

    async def repeat() -> None:
        Orders(pool, path, run, listed).repeat()

    loop.run(repeat())
    return {member.url: member.name for member in pool.members}


def test_another_producer_of_the_run_repeats_them(ordered: Path, make_pool, loop: EventLoopThread) -> None:
    pool = make_pool(*LISTED)
    assert after(pool, ordered, loop) == {B: "mine"}

    async def return_of(boot_id: str) -> bool:
        return pool.register("http://10.0.0.9:8000", "registered", boot_id) is not None

    assert not loop.run(return_of("boot-9")) and loop.run(return_of("boot-10"))


def test_who_starts_the_run_with_other_instances_has_decided_anew(
    ordered: Path, make_pool, loop: EventLoopThread
) -> None:
    assert after(make_pool(A), ordered, loop, listed=[A]) == {A: "10.0.0.1:8000"}


@pytest.mark.parametrize("before", ["of another run", "of another release", "torn"])
def test_a_file_that_is_not_the_runs_changes_nothing(
    before: str, ordered: Path, make_pool, loop: EventLoopThread
) -> None:
    if before != "of another run":
        ordered.write_text('{"lease":"run:1","added":{},"left":{"A":null}}' if before == "of another release" else "{")
    assert set(after(make_pool(*LISTED), ordered, loop, run="other")) == {A, D}


def test_a_pool_that_all_have_left_names_them(ordered: Path, make_pool, loop: EventLoopThread) -> None:
    pool = make_pool(*LISTED)
    after(pool, ordered, loop)

    async def remove() -> None:
        pool.remove("mine")

    loop.run(remove())
    assert "the pool is empty; async-rl fleet add takes back" in (said := pool.describe("nobody is there"))
    assert "10.0.0.1:8000" in said and "mine" in said


def test_what_was_removed_and_added_again_is_there(ordered: Path, make_pool, loop: EventLoopThread) -> None:
    async def add_again() -> None:
        orders = Orders(make_pool(*LISTED), ordered, RUN, LISTED)
        orders.repeat()
        orders.add(A, None)
        # Under another name than it had.
        orders.add(D, None)

    loop.run(add_again())
    assert set(after(make_pool(*LISTED), ordered, loop)) == {A, B, D}


def test_another_process_that_registered_itself_is_there(ordered: Path, make_pool, loop: EventLoopThread) -> None:
    """In the place of one that had left, as after each SIGTERM; not while that one still drains."""

    async def register(pool: InferencePool, boot_id: str) -> bool:
        orders = Orders(pool, ordered, RUN, LISTED)
        orders.repeat()
        is_there = orders.register(D, "of a name of its own", boot_id) is not None
        if boot_id == "boot-5":
            orders.drain(D)
            assert orders.register(D, "of a name of its own", boot_id) is not None, "it is told to go when it has"
        return is_there

    assert not loop.run(register(make_pool(*LISTED), "boot-4"))
    assert loop.run(register(make_pool(*LISTED), "boot-5"))
    assert set(after(make_pool(*LISTED), ordered, loop)) == {B}
    assert loop.run(register(make_pool(*LISTED), "boot-6"))
    assert set(after(make_pool(*LISTED), ordered, loop)) == {B, D}


def test_what_left_a_name_service_stays_out_until_its_address_was_gone(
    make_pool, loop: EventLoopThread, tmp_path: Path
) -> None:
    addresses = {"10.0.0.1", "10.0.0.2"}

    async def resolve(host: str, port: int) -> set[str]:
        return addresses

    def started() -> tuple[InferencePool, Orders, DnsMembership]:
        pool = make_pool()
        orders = Orders(pool, tmp_path / ORDERS_FILE, RUN)
        orders.repeat()
        return pool, orders, DnsMembership(pool, "inference.svc:8000", resolve, orders=orders)

    async def look() -> list[list[str]]:
        pool, orders, names = started()
        await names.refresh()
        orders.remove(A)
        pool, orders, names = started()
        seen = []
        for present in ({"10.0.0.1", "10.0.0.2"}, {"10.0.0.2"}, {"10.0.0.1", "10.0.0.2"}):
            addresses.clear()
            addresses.update(present)
            await names.refresh()
            seen.append(sorted(member.url for member in pool.members))
        pool, orders, names = started()
        await names.refresh()
        return [*seen, sorted(member.url for member in pool.members)]

    assert loop.run(look()) == [[B], [B], [A, B], [A, B]]


def test_one_that_cannot_be_kept_is_carried_out(
    make_pool, loop: EventLoopThread, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def add() -> str:
        return Orders(make_pool(A), tmp_path / "none" / ORDERS_FILE, RUN).add(B, "mine").url

    assert loop.run(add()) == B
    assert "is not kept for the run's next start" in caplog.text


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
