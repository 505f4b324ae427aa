"""The address at which an instance is reachable, by whom, and its registration with a fleet; for every engine."""

import logging
import socket
from urllib.parse import urlsplit

from async_rl.errors import ConfigError
from async_rl.shared.net.http_client import http_url
from async_rl.shared.net.local_address import address_for_others, address_towards, is_loopback, leads_to_this_host
from inference_service.options import TOKEN_VARIABLE, Options
from inference_service.registration import Registration

logger = logging.getLogger("inference_service")

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
ANY_ADDRESS = frozenset({"0.0.0.0", "::"})

LEAVE_TIMEOUT_S = 30.0
"""How long an instance that received a signal waits for its fleet to finish all requests it has there."""


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return http_url(host, port)


def registration_of(options: Options, listener: socket.socket, token: str | None, boot_id: str) -> Registration | None:
    """The registration with the options' fleet, not started yet; None without one. `boot_id` is the one in the
    instance's responses.

    Raises:
        ConfigError: the fleet could not reach the instance at the URL of the registration.
    """
    if options.register is None:
        return None

    def own_url(fleet_url: str) -> str:
        return options.advertise or _url_for(options, listener, urlsplit(fleet_url).hostname or "")

    return Registration(options.register, own_url, options.name, token, boot_id, options.patience_s)


def _url_for(options: Options, listener: socket.socket, fleet_host: str) -> str:
    """The URL at which the fleet at that host reaches the instance."""
    port = listener.getsockname()[1]
    if options.host in ANY_ADDRESS:
        try:
            address = address_towards(fleet_host)
        except OSError:
            # The trainer may start later, and its host name may not resolve until then.
            address = address_for_others()
        return http_url(address, port)
    if is_loopback(listener.getsockname()[0]) and _is_elsewhere(fleet_host):
        raise ConfigError(
            f"--host {options.host} is reached from this host only, but --register {options.register} is another one: "
            "give --host 0.0.0.0, or the address of this host in the trainer's network"
        )
    return url_of(listener)


def _is_elsewhere(host: str) -> bool:
    """Whether `host` is known to be another host."""
    try:
        return not leads_to_this_host(host)
    except OSError:
        return False


def warn_if_exposed(host: str, token: str | None) -> None:
    """Logs a warning about what other hosts on the network can do."""
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
