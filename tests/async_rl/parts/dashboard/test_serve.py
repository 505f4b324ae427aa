import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from async_rl.parts.dashboard.__main__ import DashboardServer
from async_rl.parts.dashboard.page import MODULES, STATIC, Dashboard, static_file
from async_rl.parts.dashboard.run_data import open_run
from async_rl.shared.net.listener import listen
from tests.support.synthetic_run import SyntheticRun

LIMIT_S = 60

Asked = Callable[[aiohttp.ClientSession], Awaitable[None]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SyntheticRun:
    run = SyntheticRun(tmp_path_factory.mktemp("runs") / "first", num_iterations=20)
    run.write()
    return run


def serve(runs: list[SyntheticRun], ask: Asked, token: str | None = None) -> None:
    """Serves the runs while `ask` uses a client of the server."""

    async def asked() -> None:
        listener = listen("the dashboard", "127.0.0.1", 0, None)
        base = f"http://127.0.0.1:{listener.getsockname()[1]}/dashboard/"
        dashboard = Dashboard([open_run(each.run_dir) for each in runs])
        async with DashboardServer(dashboard, listener, token), aiohttp.ClientSession(base) as client:
            await asyncio.wait_for(ask(client), LIMIT_S)

    asyncio.run(asked())


def test_all_files_of_the_page_are_served_and_its_policy_allows_nothing_else(run: SyntheticRun) -> None:
    async def ask(client: aiohttp.ClientSession) -> None:
        for name in ("", *STATIC):
            async with client.get(name) as answer:
                assert answer.status == 200
                assert (await answer.text()) == static_file(name or "index.html")
                policy = answer.headers["Content-Security-Policy"]
                assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
                assert "unsafe" not in policy and "http" not in policy
                assert answer.headers["X-Content-Type-Options"] == "nosniff"

    serve([run], ask)


def test_nothing_in_the_page_names_another_host() -> None:
    for name in ("index.html", "style.css", *MODULES):
        text = static_file(name)
        assert "https:" not in text and "//cdn" not in text
        assert "innerHTML" not in text and "eval(" not in text and " on" + "click=" not in text


def test_the_data_is_that_of_the_records(run: SyntheticRun) -> None:
    async def ask(client: aiohttp.ClientSession) -> None:
        async with client.get("api/runs") as answer:
            assert [each["name"] for each in (await answer.json())["runs"]] == ["first", "first (2)"]
        async with client.get("api/records?run=1") as answer:
            metrics = (await answer.json())["metrics"]
            assert metrics["columns"]["reward_mean"] == [run.record(i)["reward_mean"] for i in range(20)]
        async with client.get("api/period?run=0&iteration=7") as answer:
            assert len((await answer.json())["groups"]) == run.num_groups
        async with client.get("api/samples?run=0&iteration=7&lowest=1&limit=2") as answer:
            rows = (await answer.json())["rows"]
            assert [row["prompt"] for row in rows] == ["What is 7 + 0?", "What is 7 + 1?"]

    serve([run, run], ask)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("api/records?run=1", 400),
        ("api/records", 400),
        ("api/records?run=-1", 400),
        ("api/records?run=0&num_records=x", 400),
        ("api/period?run=0", 400),
        ("api/period?run=0&iteration=" + "9" * 5000, 400),
        ("api/period?run=0&iteration=99999", 200),
        ("api/samples?run=0&lowest=cold", 400),
        ("api/samples?run=0&lowest=nan&text=%00%ff", 200),
        ("api/nothing", 404),
        ("../../etc/passwd", 404),
        ("uplot/../../page.py", 404),
        ("%2e%2e/page.py", 404),
    ],
)
def test_requests_that_make_no_sense_are_refused(run: SyntheticRun, path: str, status: int) -> None:
    async def ask(client: aiohttp.ClientSession) -> None:
        async with client.get(path) as answer:
            # Without "/dashboard" in front, a path is not known to the server at all.
            assert answer.status == status
            if status == 400:
                assert (await answer.json())["error"]

    serve([run], ask)


def test_a_token_protects_the_records_but_not_the_page(run: SyntheticRun) -> None:
    async def ask(client: aiohttp.ClientSession) -> None:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret "}):
            for path in ("api/runs", "api/records?run=0", "api/events"):
                async with client.get(path, headers=headers) as answer:
                    assert answer.status == 401
        async with client.get("main.js") as answer:
            assert answer.status == 200
        async with client.get("api/runs", headers={"Authorization": "Bearer secret"}) as answer:
            assert answer.status == 200

    serve([run], ask, token="secret")


def test_another_sites_name_for_this_machine_is_refused(run: SyntheticRun) -> None:
    async def ask(client: aiohttp.ClientSession) -> None:
        for host, status in [
            ("rebound.example:80", 403),
            ("", 403),
            ("localhost", 200),
            ("LOCALHOST:1", 200),
            ("[::1]:1", 200),
            ("[::1]", 200),
            ("127.0.0.1", 200),
            (socket.gethostname(), 200),
        ]:
            async with client.get("api/runs", headers={"Host": host}) as answer:
                assert answer.status == status, host

    serve([run], ask)


def test_events_tell_of_each_change_while_the_run_writes(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", num_iterations=3)
    run.write(last=1)

    async def ask(client: aiohttp.ClientSession) -> None:
        async with client.get("api/events") as answer:
            assert answer.content_type == "text/event-stream"
            for num_records in (1, 2, 3):
                line = await answer.content.readuntil(b"\n\n")
                (state,) = json.loads(line.removeprefix(b"data: "))
                assert state["num_records"] == num_records
                run.write(first=num_records, last=num_records + 1)

    serve([run], ask)
