"""How a command finds the endpoint of a run, and what it makes of every answer; the endpoint is a thread."""

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import AsyncRLError, ConfigError, UnknownInstance
from async_rl.rollouts.fleet.endpoint import EndpointFailed, FleetClient, find_endpoint
from async_rl.shared.protocol.fleet import ADDRESS_FILE, FleetInfo


class Endpoint(BaseHTTPRequestHandler):
    """Answers with what its server holds, and notes what was sent."""

    def _answer(self) -> None:
        server: Any = self.server
        length = int(self.headers.get("Content-Length") or 0)
        server.seen.append((self.command, self.path, self.headers.get("Authorization"), self.rfile.read(length)))
        status, body = server.answer
        if status == 0:
            self.wfile.write(body)
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = _answer

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Any]:
    server: Any = HTTPServer(("127.0.0.1", 0), Endpoint)
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def _fresh(endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint.seen = []
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")


def error(message: str, code: int, param: str | None = None) -> bytes:
    return json.dumps({"error": {"message": message, "type": "E", "param": param, "code": code}}).encode()


FAULTS: list[tuple[int, bytes, type[AsyncRLError], str]] = [
    (401, b"", ConfigError, "refused the token: set ASYNC_RL_TOKEN"),
    (401, error("a token is needed", 401), ConfigError, "refused the token: set ASYNC_RL_TOKEN"),
    (404, error("the fleet has no instance 'x'", 404, "name"), UnknownInstance, "the fleet has no instance 'x'"),
    (404, error("Not Found", 404), ConfigError, "has no such route: is it the fleet endpoint of a run?"),
    (404, b"<html>", ConfigError, "answered 404: is it the fleet endpoint of a run?"),
    (409, error("called 'a' already", 409, "name"), ConfigError, "called 'a' already"),
    (500, error("it broke", 500), EndpointFailed, "it broke"),
    (502, b"<html>bad gateway", ConfigError, "answered 502: is it the fleet endpoint of a run?"),
    (200, b"", EndpointFailed, "/fleet answers something else: is it the fleet endpoint of a run?"),
    (200, b'{"ok": true}', EndpointFailed, "/fleet answers something else"),
    (200, b"\xff", EndpointFailed, "/fleet answers something else"),
    (0, b"", EndpointFailed, "no fleet endpoint answers at http"),
    (0, b"SSH-2.0-OpenSSH\r\n", EndpointFailed, "no fleet endpoint answers at http"),
]


@pytest.mark.parametrize(("status", "body", "kind", "words"), FAULTS, ids=range(len(FAULTS)))
def test_every_answer_that_is_none_is_a_named_error(
    endpoint: Any, status: int, body: bytes, kind: type[AsyncRLError], words: str
) -> None:
    endpoint.answer = (status, body)
    with pytest.raises(AsyncRLError) as caught:
        FleetClient(endpoint.url, "secret").info()
    assert type(caught.value) is kind and words in str(caught.value)


@pytest.mark.parametrize("token", ["secret", None, ""])
def test_the_token_goes_along_and_no_proxy_is_asked(endpoint: Any, token: str | None) -> None:
    endpoint.answer = (401, b"")
    with pytest.raises(ConfigError):
        FleetClient(endpoint.url + "/", token).info()
    assert endpoint.seen == [("GET", "/fleet", f"Bearer {token}" if token else None, b"")]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:9",
        "http://nowhere.invalid:1",
        "http://[::1",
        "http://a b:1",
        "http://127.0.0.1:port",
        "http://",
    ],
)
def test_an_address_where_nobody_answers_or_that_is_none_is_a_named_error(url: str) -> None:
    with pytest.raises(EndpointFailed, match="no fleet endpoint answers at"):
        FleetClient(url, None).info()


def test_a_change_is_posted_as_its_body(endpoint: Any) -> None:
    endpoint.answer = (500, error("full", 500))
    body = FleetInfo.model_construct()
    with pytest.raises(EndpointFailed, match="full"):
        FleetClient(endpoint.url, None).post("/fleet/add", body)
    ((method, path, _, sent),) = endpoint.seen
    assert (method, path, sent) == ("POST", "/fleet/add", body.model_dump_json().encode())


def write_address(run_dir: Path, url: str, age_s: int = 0) -> None:
    run_dir.mkdir(parents=True)
    file = run_dir / ADDRESS_FILE
    file.write_text(json.dumps({"url": url}))
    os.utime(file, (1e9 - age_s, 1e9 - age_s))


def test_an_endpoint_is_the_url_given_or_that_of_the_run_or_of_the_newest_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no run goes on under .*name one with --run RUN_DIR"):
        find_endpoint(None, None)
    for i, age_s in enumerate((30, 10, 20)):
        write_address(tmp_path / "runs" / f"r{i}", f"http://r{i}:1", age_s)
    write_address(tmp_path / "elsewhere", "http://elsewhere:1")
    assert find_endpoint(None, None).url == "http://r1:1"
    assert find_endpoint(None, tmp_path / "elsewhere").url == "http://elsewhere:1"
    assert find_endpoint("http://given:1", tmp_path / "runs" / "r0").url == "http://given:1"


def test_a_run_that_ended_at_this_very_moment_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file goes between the look into the folder and the look at the file."""
    monkeypatch.chdir(tmp_path)
    write_address(tmp_path / "runs" / "going", "http://going:1", age_s=10)
    (tmp_path / "runs" / "ended").mkdir()
    (tmp_path / "runs" / "ended" / ADDRESS_FILE).symlink_to(tmp_path / "gone")
    assert find_endpoint(None, None).url == "http://going:1"


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "3", '"x"', "null"])
def test_a_file_without_an_address_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / ADDRESS_FILE).write_text(content)
    with pytest.raises(ConfigError, match=r"fleet\.json' does not hold the address of an endpoint: .*; use --url URL"):
        find_endpoint(None, tmp_path)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://a:1", "a"])
def test_what_is_no_url_and_a_run_that_has_ended_are_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=f"--url '{url}' is not a URL: write http://host:port"):
        find_endpoint(url, None)
    with pytest.raises(ConfigError, match="does not exist: the run has ended, or this is not its directory"):
        find_endpoint(None, tmp_path)
