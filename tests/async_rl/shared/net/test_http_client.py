"""The client of programs that wait, against servers that are well, elsewhere, slow, endless or not there."""

import gzip
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import Mock

import httpx
import pytest

from async_rl.errors import ConfigError, NoAnswer
from async_rl.shared.net.http_client import MAX_ANSWER_BYTES, HttpClient, answers_200, authorization, http_url
from async_rl.shared.protocol.fleet import NameRequest

TIMEOUT_S = 1.0
Serve = Callable[[Callable[[BaseHTTPRequestHandler], None]], str]
HOST = "127.0.0.1"


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server that answers every request as the given function does; returns its URL."""
    servers = []

    def start(answer: Callable[[BaseHTTPRequestHandler], None]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer(self)

            def do_POST(self) -> None:
                answer(self)

            def log_message(self, *_: object) -> None:
                pass

        servers.append(ThreadingHTTPServer((HOST, 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.02,), daemon=True).start()
        return http_url(HOST, servers[-1].server_address[1])

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def send(handler: BaseHTTPRequestHandler, status: int = 200, body: bytes = b"{}", **headers: str) -> None:
    handler.send_response(status)
    for name, value in ({"content_length": str(len(body))} | headers).items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def test_any_status_is_an_answer_with_its_body(serve: Serve) -> None:
    asked: list[bytes] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.rfile.read(int(handler.headers.get("content-length", 0))))
        send(handler, 503 if handler.path == "/health" else 200, b"words")

    client = HttpClient(serve(answer) + "/", TIMEOUT_S)
    health = client.get("/health")
    assert (health.status, health.body, health.is_success) == (503, b"words", False)
    assert client.post("/fleet/drain", NameRequest(name="a")).is_success and asked[-1] == b'{"name":"a"}'
    assert answers_200(client, "/other") and not answers_200(client, "/health")


def test_no_connection_is_kept_which_another_thread_could_be_given_while_it_is_closed(serve: Serve) -> None:
    seen: list[tuple[object, str]] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        seen.append((handler.client_address, handler.headers["connection"]))
        handler.protocol_version = "HTTP/1.1"
        send(handler)

    client = HttpClient(serve(answer), TIMEOUT_S)
    for _ in range(3):
        client.get("/health")
    assert len({address for address, _ in seen}) == 3 and {said for _, said in seen} == {"close"}


def test_the_proxies_of_the_environment_are_not_asked(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert answers_200(HttpClient(serve(send), TIMEOUT_S), "/health")


@pytest.mark.parametrize("token", ["s3cret", "źle?", "sécret", "odd \udcff byte", " led by a space"])
def test_a_token_may_be_of_any_letters(serve: Serve, token: str) -> None:
    seen: list[bytes] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        seen.append(handler.headers["authorization"].encode("latin-1"))
        send(handler)

    HttpClient(serve(answer), TIMEOUT_S, token).get("/")
    assert seen == [b"Bearer " + token.encode(errors="surrogateescape")]


@pytest.mark.parametrize("token", ["s3cret\n", "s3\r\nX-Other: 1", "s3cret ", "s3\0cret"])
def test_a_token_that_no_header_can_have_is_refused_and_not_repeated(token: str) -> None:
    with pytest.raises(ConfigError, match="ASYNC_RL_TOKEN") as caught:
        authorization(token)
    assert "s3" not in str(caught.value)


def test_a_redirect_is_not_followed_so_the_token_goes_nowhere_else(serve: Serve) -> None:
    elsewhere: list[str] = []

    def other(handler: BaseHTTPRequestHandler) -> None:
        elsewhere.append(handler.path)
        send(handler)

    url = serve(other)
    client = HttpClient(serve(lambda handler: send(handler, 302, location=f"{url}/stolen")), TIMEOUT_S, "s3cret")
    assert client.get("/fleet").status == 302 and elsewhere == []


def test_a_packed_answer_is_not_unpacked(serve: Serve) -> None:
    packed = gzip.compress(b"0" * 2**20)
    asked: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.headers["accept-encoding"])
        send(handler, body=packed, content_encoding="gzip")

    assert HttpClient(serve(answer), TIMEOUT_S).get("/").body == packed and asked == ["identity"]


def until_hung_up(handler: BaseHTTPRequestHandler, piece: bytes, pause_s: float) -> None:
    """Announces a long body and writes pieces of it for as long as somebody listens."""
    send(handler, body=b"", content_length=str(10 * MAX_ANSWER_BYTES))
    with suppress(OSError):
        while True:
            handler.wfile.write(piece)
            time.sleep(pause_s)


def test_an_answer_that_drips_or_does_not_end_is_none(serve: Serve) -> None:
    begun = time.monotonic()
    with pytest.raises(NoAnswer, match="not whole within 1 s"):
        HttpClient(serve(lambda handler: until_hung_up(handler, b"0", 0.1)), TIMEOUT_S).get("/")
    assert time.monotonic() - begun < 20, "far from the day that the whole body would take"
    with pytest.raises(NoAnswer, match=f"longer than {MAX_ANSWER_BYTES} bytes"):
        HttpClient(serve(lambda handler: until_hung_up(handler, b"0" * 2**20, 0.0)), 60.0).get("/")


def test_whoever_does_not_answer_is_told_in_the_systems_words() -> None:
    with socket.create_server((HOST, 0)) as deaf:
        port = deaf.getsockname()[1]
        with pytest.raises(NoAnswer, match="timed out"):
            HttpClient(http_url(HOST, port), 0.2).get("/health")
    with pytest.raises(NoAnswer, match=r"^Connection refused$"):
        HttpClient(http_url(HOST, port), TIMEOUT_S).get("/health")
    with pytest.raises(NoAnswer, match=r"not known|resolution"):
        HttpClient("http://nowhere.invalid:1", TIMEOUT_S).get("/health")
    for url in ("http://[::1:9", "http://", "http://host:99999", "ftp://host"):
        with pytest.raises(NoAnswer):
            HttpClient(url, TIMEOUT_S).get("/health")


@pytest.mark.parametrize("host", ["a..b", "xn--a", "h" * 400])
def test_a_host_name_that_cannot_be_one_is_not_answered(host: str) -> None:
    with pytest.raises(NoAnswer):
        HttpClient(f"http://{host}", 1.0).get("/")


def test_an_ipv6_address_takes_brackets() -> None:
    assert http_url("10.0.0.7", 8000) == "http://10.0.0.7:8000"
    assert http_url("fd00::7", 8000) == "http://[fd00::7]:8000"


def test_servers_with_tls_are_verified_by_the_systems_authorities_which_others_do_not_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[ssl.SSLContext] = []
    monkeypatch.setattr(httpx, "Client", lambda *, verify, **_: made.append(verify))
    loads = Mock(wraps=ssl.create_default_context)
    monkeypatch.setattr(ssl, "create_default_context", loads)
    for url in ("https://host:1", "HTTPS://host"):
        HttpClient(url, TIMEOUT_S)
    assert loads.call_count == 2
    for url in ("http://host:1", "httpx://host", "host:1"):
        HttpClient(url, TIMEOUT_S)
    assert loads.call_count == 2
    assert all(each.verify_mode == ssl.CERT_REQUIRED and each.check_hostname for each in made), "whatever it comes to"
    assert not any(each.cert_store_stats()["x509"] for each in made[2:])
