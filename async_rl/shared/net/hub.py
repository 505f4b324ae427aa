"""Whether the Hugging Face hub can be reached: where nothing answers, its libraries try for minutes.

Called before a model or a data set is looked for there: by the pre-flight, the data and the trainer.
"""

import socket
import threading
from functools import cache
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

LIMIT_S = 5.0
"""For finding the name and opening a connection, which take a tenth of a second."""


@cache
def hub_fault() -> str | None:
    """Why the hub cannot be reached, None if it can or is not to be asked; found once, within `LIMIT_S`.

    From then on the hub's libraries use what their cache has, in this process. Needs huggingface-hub.
    """
    constants: Any = import_module("huggingface_hub.constants")
    if constants.HF_HUB_OFFLINE:
        return None
    host, port, what = _first_hop(constants.ENDPOINT)
    reason = _connection_fault(host, port)
    if reason is None:
        return None
    constants.HF_HUB_OFFLINE = True
    return f"{what} cannot be reached ({reason}), and the cache does not have it: check the network or HF_ENDPOINT"


def _first_hop(endpoint: str) -> tuple[str, int, str]:
    """Host and port that a request to the hub goes to: the hub's own, or its proxy's; and what that is."""
    hub = urlsplit(endpoint)
    proxy = getproxies().get(hub.scheme)
    if not proxy or proxy_bypass(hub.hostname or ""):
        return hub.hostname or "", hub.port or (80 if hub.scheme == "http" else 443), f"the hub at {endpoint}"
    hop = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    where = f"{hop.hostname}:{hop.port or 80}"
    return hop.hostname or "", hop.port or 80, f"the proxy {where}, on the way to the hub at {endpoint},"


def _connection_fault(host: str, port: int) -> str | None:
    """Why there is no connection; a resolver may not return in time, so a thread asks it, which nothing waits for."""
    found: list[str | None] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), LIMIT_S).close()
            found.append(None)
        except OSError as error:
            found.append(error.strerror or str(error))

    thread = threading.Thread(target=connect, name="async-rl-hub", daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return found[0] if found else f"no answer within {LIMIT_S:g} s"
