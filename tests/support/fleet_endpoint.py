"""A fleet endpoint that listens, and a method to send it requests."""

import json
import urllib.error
import urllib.request
from typing import Any

from async_rl.rollouts.fleet.server import FleetServer


class Endpoint:
    """A fleet endpoint that listens."""

    def __init__(self, server: FleetServer, token: str | None) -> None:
        self.server = server
        self.url = server.url
        self.token = token

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """GET, or POST of a body (bytes unchanged, everything else as JSON); returns status and parsed response."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | headers
        if self.token is not None:
            headers.setdefault("Authorization", f"Bearer {self.token}")
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, _parsed(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, _parsed(error.read())


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode()
