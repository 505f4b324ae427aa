"""Waits for a first instance before training starts, in a training pod: a trainer waits for `pool.timeout_s` only, and
an instance may have to pull its image, load a model and capture graphs."""

import socket
import threading
import time
from typing import Final
from urllib.parse import urlsplit

from async_rl.errors import NoAnswer
from async_rl.shared.net.http_client import HttpClient, http_url
from async_rl.shared.protocol.routes import HEALTH

TIMEOUT_S: Final = 1800.0
"""Afterwards the trainer may say what is missing."""

POLL_S: Final = 2.0


def wait_for_instance(service: str, told: threading.Event) -> None:
    """Waits until an instance behind a headless service is healthy, for `TIMEOUT_S` at most, or until `told` is set.

    Args:
        service: the URL of the service, whose name leads to all instances.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while not any(map(_is_healthy, _instances(service))) and time.monotonic() < deadline:
        if told.wait(POLL_S):
            return


def _instances(service: str) -> list[str]:
    """The URLs of the instances that have a pod."""
    name = urlsplit(service)
    try:
        found = socket.getaddrinfo(name.hostname, name.port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [http_url(str(address[0]), int(address[1])) for *_, address in found]


def _is_healthy(url: str) -> bool:
    try:
        return HttpClient(url, POLL_S).get(HEALTH).is_success
    except NoAnswer:
        return False
