"""Ports for processes that are about to start on this machine."""

import errno
import random
import socket
from contextlib import ExitStack
from pathlib import Path

from async_rl.errors import ConfigError
from async_rl.shared.net.local_address import LOOPBACK, missing_loopback

LOWEST_PORT, HIGHEST_PORT = 20000, 65535
"""Ray's workers listen below."""

EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The first and the last port that the system gives to outgoing connections."""

USUAL_EPHEMERAL_PORTS = (49152, 65535)
"""IANA's, for systems that do not say theirs."""


def free_ports(count: int, host: str = LOOPBACK, outgoing: tuple[int, int] | None = None) -> list[int]:
    """`count` different TCP ports that nobody uses at `host`.

    None is one that the system gives to outgoing connections, where it leaves enough others: such a connection, of any
    process, could take a port before the process that it is meant for listens there. `outgoing` are the first and the
    last of them, by default those of this system.

    Raises:
        ConfigError: there are not as many, or this process may not open as many at once.
    """
    first, last = outgoing or _outgoing_ports()
    every = range(LOWEST_PORT, HIGHEST_PORT + 1)
    others = [port for port in every if not first <= port <= last]
    ports: list[int] = []
    with ExitStack() as stack:
        for port in [*random.sample(others, len(others)), *range(max(first, LOWEST_PORT), last + 1)]:
            if len(ports) == count:
                break
            try:
                each = stack.enter_context(socket.socket())
                each.bind((host, port))
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    each.close()
                    continue
                remedy = missing_loopback(host) or "lower inference.num_instances, or raise `ulimit -n`"
                raise ConfigError(
                    f"this run needs {count} free ports, one for each instance, and this process can have {len(ports)} "
                    f"of {host} ({error.strerror}): {remedy}"
                ) from error
            ports.append(port)
    if len(ports) < count:
        raise ConfigError(
            f"this run needs {count} free ports, one for each instance, and {len(ports)} of {len(every)} are not in "
            "use: lower inference.num_instances"
        )
    return ports


def _outgoing_ports() -> tuple[int, int]:
    try:
        first, last = map(int, EPHEMERAL_PORTS.read_text().split())
    except OSError:
        return USUAL_EPHEMERAL_PORTS
    return first, last
