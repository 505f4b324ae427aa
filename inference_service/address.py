"""Under which address an instance answers, who may reach it there, and what it tells its fleet; for every engine."""

import logging
import socket

from async_rl.errors import ConfigError
from inference_service.options import TOKEN_VARIABLE, Options
from inference_service.registration import Registration

logger = logging.getLogger("inference_service")

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
ANY_ADDRESS = frozenset({"0.0.0.0", "::"})

LEAVE_TIMEOUT_S = 30.0
"""How long an instance that a signal ends waits until its fleet has nothing under way there any more."""


def url_of(listener: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def registration_of(options: Options, listener: socket.socket, token: str | None) -> Registration | None:
    """What joins the fleet that the options name, not started yet; None where they name none.

    Raises:
        ConfigError: the fleet could not reach the instance under the URL it would be told.
    """
    if options.register is None:
        return None
    if options.advertise is None and options.host in ANY_ADDRESS:
        raise ConfigError(
            f"--host {options.host} is no address that a trainer can reach: give --advertise http://host:port too"
        )
    return Registration(options.register, options.advertise or url_of(listener), options.name, token)


def warn_if_exposed(host: str, token: str | None) -> None:
    """Says in the log what others on the network can do."""
    if host in LOOPBACK:
        return
    if token is None:
        logger.warning(
            "--host %s without %s: whoever reaches the port can read what is generated and replace the weights",
            host,
            TOKEN_VARIABLE,
        )
    else:
        logger.warning("--host %s: the token and all answers cross the network as they are, without TLS", host)
