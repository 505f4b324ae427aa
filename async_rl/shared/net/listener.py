"""Sockets that our own servers listen on, and the URLs at which others reach them; for servers on the event loop."""

import socket

from async_rl.errors import ConfigError
from async_rl.shared.net.http_client import http_url
from async_rl.shared.net.local_address import (
    address_for_others,
    addresses_of,
    is_loopback,
    is_unspecified,
    missing_loopback,
)


def bound(host: str, port: int) -> socket.socket:
    """A socket that is bound to the first address of `host`; for names, too, that have an IPv6 address only.

    Raises:
        OSError: the name is unknown, or the address or the port cannot be used.
    """
    family, kind, proto, _, address = addresses_of(host, port, socket.SOCK_STREAM)[0]
    # asyncio sets TCP_NODELAY only if the protocol is given; without it, every response is delayed by 40 ms until its
    # first part is acknowledged.
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def listen(name: str, host: str, port: int, setting: str | None) -> socket.socket:
    """A socket that listens at `host` and `port`; 0 takes a free one.

    Args:
        name: of the server, for errors.
        setting: which names the host, for errors; None where host and port are the options --host and --port.

    Raises:
        ConfigError: the address or the port cannot be used.
    """
    try:
        listener = bound(host, port)
        try:
            listener.listen()
        except OSError:
            listener.close()
            raise
    except OSError as error:
        where = f"{host}:{port} ({setting})" if setting else f"--host = {host!r}, --port = {port}"
        anywhere = "name an address of this host and a free port, or 0 for any free port"
        remedy = missing_loopback(host, f"the host of {setting}" if setting else "--host") or anywhere
        raise ConfigError(f"{name} cannot listen at {where}: {error.strerror}; {remedy}") from error
    return listener


def url_for_others(listener: socket.socket, address: str | None = None) -> str:
    """The URL of a listener; `address` is this host's where it listens on all interfaces, None determines one."""
    host, port = listener.getsockname()[:2]
    if is_unspecified(host):
        host = address or address_for_others()
    return http_url(host, port)


def is_open_to_network(listener: socket.socket) -> bool:
    """Whether programs on other hosts can reach it."""
    return not is_loopback(listener.getsockname()[0])
