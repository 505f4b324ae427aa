"""Whether a service can be reached from where a run is started; elsewhere, or later, it may be otherwise."""

import logging
import socket
from urllib.parse import urlsplit

from async_rl.config.secrets import masked_text

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0

PORTS = {"http": 80, "https": 443}


def warn_if_unreachable(setting: str, url: str) -> None:
    """Connects to the URL, the value of `setting`, and logs a warning if that fails."""
    parts = urlsplit(url)
    try:
        with socket.create_connection((parts.hostname, parts.port or PORTS[parts.scheme]), TIMEOUT_S):
            return
    except (OSError, UnicodeError) as error:
        log.warning(
            "%s is %r, which cannot be reached from here (%s): start the service before it is needed",
            setting,
            masked_text(url),
            error,
        )
