"""Sends thousands of bad requests to a running HTTP server over real sockets: every response must be 4xx."""

from collections import Counter
from collections.abc import Mapping
from http.client import HTTPException, HTTPResponse
from socket import SHUT_WR, create_connection, socket
from typing import Any
from urllib.parse import urlsplit

from hypothesis import HealthCheck, Phase, given, settings

from tests.support.bad_requests import Attacks, BadRequest

TIMEOUT_S = 20.0


class Sender:
    """Sends requests one after the other, on one connection while the server keeps it open."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = (str(parts.hostname), parts.port or 80)
        self._connection: socket | None = None

    def status(self, request: BadRequest) -> int:
        """The response's status.

        Raises:
            OSError, HTTPException: there is no response, or it is not HTTP.
        """
        if not request.is_http:
            self.close()
        fresh = self._connection is None
        try:
            return self._exchange(request)
        except (OSError, HTTPException):
            self.close()
            if fresh:
                raise
            # The server may just have closed an idle connection.
            return self._exchange(request)

    def _exchange(self, request: BadRequest) -> int:
        if self._connection is None:
            self._connection = create_connection(self._address, TIMEOUT_S)
        self._connection.sendall(request.raw)
        if not request.is_http:
            self._connection.shutdown(SHUT_WR)
        answer = HTTPResponse(self._connection, method=request.method)
        answer.begin()
        answer.read()
        if answer.will_close or not request.is_http:
            self.close()
        return answer.status

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def fuzz(
    url: str,
    document: Mapping[str, Any],
    token: str | None = None,
    open_paths: frozenset[str] = frozenset(),
    *,
    num_requests: int,
) -> Counter[int]:
    """Sends `num_requests` bad requests and returns the count of each status; `open_paths` need no token.

    Raises:
        AssertionError: a response was not 4xx; the message shows the smallest such request found.
    """
    sender = Sender(url)
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=num_requests,
        database=None,
        derandomize=True,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(Attacks(document, token, open_paths).all_kinds())
    def attack(request: BadRequest) -> None:
        try:
            status = sender.status(request)
        except (OSError, HTTPException) as error:
            raise AssertionError(f"no answer ({error!r}) to {request}") from error
        statuses[status] += 1
        assert 400 <= status < 500, f"{status} to {request}"

    try:
        attack()
    finally:
        sender.close()
    return statuses
