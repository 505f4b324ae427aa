"""Blocking requests to another process of the run, one at a time: for the fleet's commands, an instance that registers,
and programs that wait until a server is healthy.

Code on an event loop uses aiohttp (`async_rl.rollouts.instance.connections`); the header with the token is the same.
"""

import ssl
import time
from dataclasses import dataclass
from typing import Final

import httpx
from pydantic import BaseModel

from async_rl.errors import ConfigError, NoAnswer
from async_rl.shared.protocol.routes import RUN_HEADER

MAX_ANSWER_BYTES: Final = 16 * 2**20
"""The list of a fleet of ten thousand instances is smaller."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response of any status, its body as it was sent."""

    status: int
    reason: str
    body: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


class HttpClient:
    """Client of the server at `base_url`, usable from any thread, with a new connection for each request.

    The proxies and credentials of the environment are not used: the server is in the run's own network, often this
    host. A redirect is returned like other responses, so that the token is sent to no other server. `timeout_s` limits
    each wait for the server, and the time from the request to the end of the body. `run` is the uid of the run that the
    requests are for, where it is known: the fleet endpoint of another run refuses them.

    Raises:
        ConfigError: the token is not valid in a header.
    """

    def __init__(self, base_url: str, timeout_s: float, token: str | None = None, run: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        # No compression: a few bytes may expand to gigabytes. A kept connection the server may close just when the next
        # request is sent, and httpcore's pool closes idle ones that another thread's request has just been given.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "Connection": "close"}
        # As bytes, not as latin-1: see `authorization`.
        headers |= authorization(token)
        headers |= {} if run is None else {RUN_HEADER: run}
        self._client = httpx.Client(
            headers=[(name.encode(), value.encode(errors="surrogateescape")) for name, value in headers.items()],
            verify=_verification(self.base_url),
            timeout=timeout_s,
            trust_env=False,
            limits=httpx.Limits(),
        )

    def get(self, path: str) -> HttpResponse:
        """
        Raises:
            NoAnswer: see there.
        """
        return self._ask("GET", path)

    def post(self, path: str, body: BaseModel) -> HttpResponse:
        """
        Raises:
            NoAnswer: see there.
        """
        return self._ask("POST", path, body.model_dump_json().encode())

    def _ask(self, method: str, path: str, content: bytes | None = None) -> HttpResponse:
        deadline = time.monotonic() + self._timeout_s
        try:
            with self._client.stream(method, self.base_url + path, content=content) as response:
                body = bytearray()
                for chunk in response.iter_raw():
                    body += chunk
                    if len(body) > MAX_ANSWER_BYTES:
                        raise NoAnswer(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
                    if time.monotonic() > deadline:
                        raise NoAnswer(f"the answer was not whole within {self._timeout_s:g} s")
                return HttpResponse(response.status_code, response.reason_phrase, bytes(body))
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            # UnicodeError: a host name that cannot be one.
            raise NoAnswer(_cause(error)) from error


def _verification(url: str) -> ssl.SSLContext:
    """By the system's certificate authorities, such as a company's own; httpx would use certifi's list.

    By none where the server speaks no TLS: to read hundreds of them takes longer than its answer.
    """
    if url.lower().startswith("https:"):
        return ssl.create_default_context()
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def answers_200(client: HttpClient, path: str) -> bool:
    """Whether the server responds and is healthy."""
    try:
        return client.get(path).status == 200
    except NoAnswer:
        return False


def authorization(token: str | None) -> dict[str, str]:
    """The header required by `async_rl.shared.net.http_guard.BearerToken`; none without a token.

    A token from an environment variable that is not UTF-8 has surrogates in place of its invalid bytes.

    Raises:
        ConfigError: it has a character that is not valid in a header.
    """
    if not token:
        return {}
    if token != token.rstrip() or any(ord(char) < 0x20 or char == "\x7f" for char in token):
        raise ConfigError(
            "the token (ASYNC_RL_TOKEN) has a line break or ends with a space, as no header can: cut it off"
        )
    return {"Authorization": f"Bearer {token}"}


def http_url(host: str, port: int) -> str:
    """`http://host:port`, with brackets around an IPv6 address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _cause(error: BaseException) -> str:
    """The system's message without its number, if any; httpcore hides it as a context."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error) or repr(error)
