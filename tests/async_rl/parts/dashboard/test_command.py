"""`async-rl dashboard` as its users call it: where it listens, and whom it lets in."""

import asyncio
import re
import socket
from pathlib import Path
from urllib.parse import parse_qs

import aiohttp
import pytest

from async_rl.parts.dashboard.__main__ import DEFAULT_PORT, main, make_parser, serve
from tests.support import ROOT
from tests.support.synthetic_run import SyntheticRun

LIMIT_S = 60


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = SyntheticRun(tmp_path / "run", num_iterations=1)
    run.write()
    return run.run_dir


def statuses(
    run_dir: Path, host: str, token: str | None, capsys: pytest.CaptureFixture[str], given: str | None
) -> tuple[str, list[int]]:
    """What the command prints, and the statuses of a request without and one with the token `given`."""

    async def ask() -> tuple[str, list[int]]:
        serving = asyncio.create_task(serve([run_dir], host, 0, token))
        printed = ""
        while "/dashboard/" not in printed:
            await asyncio.sleep(0.01)
            printed += capsys.readouterr().out
        port = re.findall(r":(\d+)/dashboard/", printed)[0]
        # As the page reads it.
        shown = parse_qs("".join(re.findall(r"#(token=\S+)", printed))).get("token", [])
        found = []
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
            for each in (None, given or "".join(shown)):
                headers = {} if each is None else {"Authorization": f"Bearer {each}"}
                async with client.get("/dashboard/api/runs", headers=headers) as answer:
                    found.append(answer.status)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        return printed, found

    return asyncio.run(asyncio.wait_for(ask(), LIMIT_S))


def test_it_listens_at_this_machine_only_and_needs_no_token_there(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = make_parser().parse_args([str(run_dir)])
    assert (options.host, options.port) == ("127.0.0.1", DEFAULT_PORT)
    page = (ROOT / "docs" / "watching.md").read_text()
    assert f"listens at {options.host}, port {options.port}" in page
    printed, found = statuses(run_dir, options.host, None, capsys, None)
    assert "token" not in printed and found == [200, 200]


def test_open_to_the_network_it_makes_a_token_and_prints_it_in_the_address(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, found = statuses(run_dir, "0.0.0.0", None, capsys, None)
    assert "open to the network" in first and found == [401, 200]
    second, _ = statuses(run_dir, "0.0.0.0", None, capsys, None)
    assert re.findall("token=(.{20,})", first) != re.findall("token=(.{20,})", second)
    assert statuses(run_dir, "0.0.0.0", "mine", capsys, "mine")[1] == [401, 200]
    assert statuses(run_dir, "0.0.0.0", "mine", capsys, "yours")[1] == [401, 401]
    assert statuses(run_dir, "0.0.0.0", "a+b/c%d&e#f==", capsys, None)[1] == [401, 200], "as base64 has them"


def test_what_cannot_be_served_is_refused_by_name(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for argv, reason in (
            ([str(run_dir), "--port", port], "Address already in use"),
            ([str(run_dir), "--port", "70000"], "is not a port"),
            ([str(run_dir), "--port", "-1"], "is not a port"),
            ([str(run_dir), "--host", "203.0.113.1", "--port", "0"], "cannot listen"),
            ([str(tmp_path / "missing")], "is not a directory"),
            ([str(run_dir), str(tmp_path)], "has no records of a run"),
        ):
            assert main(argv) == 2
            assert reason in capsys.readouterr().err
