import asyncio
import json
import logging
import signal
import socket
import time
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import pytest

from async_rl.config.pool_section import PoolSection
from async_rl.errors import ConfigError
from async_rl.rollouts.fleet.server import FleetServer
from inference_service.registration import Registration

A, B = "http://10.0.0.1:8000", "http://10.0.0.2:8000"
HEARTBEAT = {"url": B, "name": "pod-2", "boot_id": "b1"}


def test_the_fleet_lists_its_instances_with_state_and_reason(make_pool, serve) -> None:
    status, fleet = serve(make_pool(A, B)).ask("/fleet")
    assert status == 200 and fleet["version"] is None and fleet["desired_instances"] is None
    assert [info["url"] for info in fleet["instances"]] == [A, B]
    first = fleet["instances"][0]
    assert (
        first["name"] == "10.0.0.1:8000"
        and first["state"] == "joining"
        and "not received any weights" in first["reason"]
    )


def test_an_instance_that_registers_is_a_member_under_the_address_it_gave(make_pool, serve) -> None:
    pool = make_pool(A)
    endpoint = serve(pool)
    for _ in range(2):
        status, answer = endpoint.ask("/fleet/register", HEARTBEAT)
        assert (status, answer) == (200, {"state": "joining", "leave": False, "interval_s": 5.0})
    assert [(member.name, member.url) for member in pool.members] == [("10.0.0.1:8000", A), ("pod-2", B)]
    assert pool.find("pod-2").entry.registered_as == "b1"


def test_a_removed_instance_is_told_to_leave_until_it_is_started_anew(make_pool, serve) -> None:
    endpoint = serve(make_pool(A))
    endpoint.ask("/fleet/register", HEARTBEAT)
    endpoint.ask("/fleet/remove", {"name": "pod-2"})
    answer = endpoint.ask("/fleet/register", HEARTBEAT)[1]
    assert answer["leave"] is True and answer["state"] is None
    answer = endpoint.ask("/fleet/register", HEARTBEAT | {"boot_id": "b2"})[1]
    assert answer["leave"] is False and answer["state"] == "joining"


def test_instances_are_added_drained_and_removed_by_name_or_url(make_pool, serve) -> None:
    pool = make_pool(A)
    endpoint = serve(pool)
    status, info = endpoint.ask("/fleet/add", {"url": B, "name": "late"})
    assert status == 200 and info["name"] == "late" and pool.find("late").url == B
    assert endpoint.ask("/fleet/drain", {"name": "late"})[1]["state"] == "draining"
    assert endpoint.ask("/fleet/remove", {"name": B})[0] == 200
    assert [member.url for member in pool.members] == [A]


def test_an_unknown_instance_is_404_and_names_the_known_ones(make_pool, serve) -> None:
    endpoint = serve(make_pool(A))
    for path in ("/fleet/drain", "/fleet/remove"):
        status, answer = endpoint.ask(path, {"name": "nobody"})
        assert status == 404 and answer["error"]["code"] == 404
        assert "'nobody'" in answer["error"]["message"] and "10.0.0.1:8000" in answer["error"]["message"]


BAD_REQUESTS: list[tuple[str, Any]] = [
    ("/fleet/add", b"{"),
    ("/fleet/add", b"[" * 100_000),
    ("/fleet/add", b'{"\\ud800": 1}'),
    ("/fleet/add", []),
    ("/fleet/add", {}),
    ("/fleet/add", {"url": A}),
    ("/fleet/add", {"url": "ftp://10.0.0.3:8000"}),
    ("/fleet/add", {"url": "http://10.0.0.3:8000/path"}),
    ("/fleet/add", {"url": "http://user:password@10.0.0.3"}),
    ("/fleet/add", {"url": "http://10.0.0.3:99999"}),
    ("/fleet/add", {"url": "http://10.0.0.3:0"}),
    ("/fleet/add", {"url": "http://[::1:8000"}),
    ("/fleet/add", {"url": "http://[:]:8000"}),
    ("/fleet/add", {"url": "http://10..3:8000"}),
    ("/fleet/add", {"url": "http://" + "a" * 64}),
    ("/fleet/add", {"url": B, "name": "10.0.0.3 8000"}),
    ("/fleet/add", {"url": B, "nmae": "late"}),
    ("/fleet/register", HEARTBEAT | {"boot_id": ""}),
    ("/fleet/register", HEARTBEAT | {"name": None}),
    ("/fleet/drain", {"name": ""}),
    ("/fleet/drain", {"name": 7}),
]


def test_a_bad_request_is_400_in_the_protocols_shape_and_changes_nothing(make_pool, serve) -> None:
    endpoint = serve(make_pool(A))
    before = endpoint.ask("/fleet")
    for path, body in BAD_REQUESTS:
        status, answer = endpoint.ask(path, body)
        assert status == 400 and answer["error"]["code"] == 400 and answer["error"]["message"], (path, body, answer)
    assert endpoint.ask("/fleet") == before


def test_unknown_routes_and_methods_are_answered_in_the_protocols_shape(make_pool, serve) -> None:
    endpoint = serve(make_pool(A))
    assert endpoint.ask("/nothing")[1]["error"]["code"] == 404
    assert endpoint.ask("/fleet/add")[1]["error"]["code"] == 405


def test_a_form_of_a_browser_cannot_change_the_fleet(make_pool, serve) -> None:
    pool = make_pool(A)
    body = json.dumps({"name": A}).encode()
    assert serve(pool).ask("/fleet/remove", body, **{"Content-Type": "text/plain"})[0] == 400
    assert len(pool.members) == 1


def test_a_body_beyond_the_limit_is_refused_before_it_is_sent(make_pool, serve) -> None:
    connection = HTTPConnection(serve(make_pool(A)).url.removeprefix("http://"), timeout=10)
    connection.putrequest("POST", "/fleet/add")
    connection.putheader("Content-Length", str(2**20 + 1))
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 413 and "longer than 1048576 bytes" in json.loads(answer.read())["error"]["message"]
    connection.close()


def test_with_a_token_only_monitors_get_in_without_it(make_pool, serve) -> None:
    pool = make_pool(A)
    endpoint = serve(pool, token="secret")
    assert endpoint.ask("/fleet")[0] == 200
    for path, body in [("/fleet", None), ("/fleet/remove", {"name": A}), ("/openapi.json", None)]:
        assert endpoint.ask(path, body, Authorization="Bearer wrong")[0] == 401
    assert [endpoint.ask(path, Authorization="")[0] for path in ("/health", "/metrics")] == [200, 200]
    assert len(pool.members) == 1


def test_the_api_describes_itself(make_pool, serve) -> None:
    paths = serve(make_pool(A)).ask("/openapi.json")[1]["paths"]
    assert set(paths) >= {"/fleet", "/fleet/register", "/fleet/add", "/fleet/drain", "/fleet/remove"}


def test_the_address_is_in_the_runs_directory_while_it_listens(make_pool, loop, tmp_path: Path) -> None:
    server = FleetServer(make_pool(A), PoolSection(), None, tmp_path)
    loop.run(server.start())
    assert json.loads((tmp_path / "fleet.json").read_text()) == {"url": server.url}
    host, port = server.url.removeprefix("http://").split(":")
    socket.create_connection((host, int(port)), timeout=5).close()
    loop.run(server.stop())
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)
    loop.run(server.stop())


def test_a_port_that_is_taken_is_refused_with_its_setting(make_pool, loop) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} \(pool\.fleet_address\): .*0 for any free port"):
            loop.run(FleetServer(make_pool(A), PoolSection(fleet_address=f"127.0.0.1:{port}")).start())


def test_a_host_of_all_interfaces_is_warned_about_and_advertised_by_address(make_pool, serve, caplog) -> None:
    pool = make_pool(A)
    with caplog.at_level(logging.WARNING):
        assert serve(pool).url.startswith("http://127.0.0.1:")
        assert caplog.text == ""
        assert serve(pool, "secret", fleet_address="0.0.0.0:0", address="localhost").url.startswith("http://localhost:")
        assert "unencrypted" in caplog.text and "WITHOUT A TOKEN" not in caplog.text
        assert serve(pool, fleet_address="0.0.0.0:0").ask("/health")[0] == 200
    assert "WITHOUT A TOKEN" in caplog.text and "set ASYNC_RL_TOKEN" in caplog.text


def test_signals_stay_with_the_program_even_on_its_main_thread(make_pool, loop) -> None:
    async def handler_while_serving() -> object:
        server = FleetServer(make_pool(A), PoolSection())
        await server.start()
        try:
            return signal.getsignal(signal.SIGTERM)
        finally:
            await server.stop()

    assert asyncio.run(handler_while_serving()) is signal.getsignal(signal.SIGTERM)


@pytest.mark.distributed
def test_an_instance_that_asks_for_leave_gets_it_when_it_is_idle(instances, make_pool, serve, loop, eventually) -> None:
    first, second = instances({}, {})
    pool = make_pool(first.url)
    endpoint = serve(pool)
    registration = Registration(endpoint.url, second.url, "pod-2")
    registration.start()
    eventually(lambda: len(pool.members) == 2)
    loop.run(pool.wait_until_ready())
    pool.find("pod-2").outstanding_tokens = 1
    leaving = Thread(target=registration.leave, args=(30.0,))
    leaving.start()
    eventually(lambda: pool.find("pod-2").state == "draining")
    leaving.join(timeout=0.5)
    assert leaving.is_alive() and not registration.leave_requested.is_set()
    pool.find("pod-2").outstanding_tokens = 0
    leaving.join()
    assert registration.leave_requested.is_set() and [member.url for member in pool.members] == [first.url]


def test_a_page_of_another_site_that_takes_the_endpoints_address_is_refused_without_a_token(make_pool, serve) -> None:
    headers = {"Host": "evil.example:1", "User-Agent": "Mozilla/5.0"}
    body = {"url": "http://10.6.6.6:1", "name": "evil", "boot_id": "b"}
    for path, sent in (("/fleet", None), ("/fleet/register", body), ("/metrics", None)):
        status, answer = serve(make_pool("http://10.0.0.1:8000")).ask(path, sent, **headers)
        assert status == 403 and "by its address only" in answer["error"]["message"]


def test_who_asks_on_before_an_answer_was_read_is_disconnected(make_pool, serve) -> None:
    """Some bytes would ask for the work of hours, without a token."""
    where = urlsplit(serve(make_pool(A)).url)
    request = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection((where.hostname, where.port), timeout=30) as connection:
        connection.sendall(200 * request)
        said = b""
        while more := connection.recv(2**16):
            said += more
    assert said.count(b"HTTP/1.1 200") == 1
    with socket.create_connection((where.hostname, where.port), timeout=30) as connection:
        for _ in range(3):
            connection.sendall(request)
            said = b""
            while b"\n# " not in said:
                said += connection.recv(2**16)
            assert said.startswith(b"HTTP/1.1 200")
            time.sleep(0.1)
