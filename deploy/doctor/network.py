"""Addresses, interfaces and ports of this host."""

import errno
import socket
from collections.abc import Iterator, Sequence

from async_rl.config.sections import Config
from async_rl.shared.net.listener import bound
from async_rl.shared.net.local_address import (
    address_for_others,
    addresses_of,
    interface_of,
    is_loopback,
    missing_loopback,
)
from deploy.cluster.plan import FLEET_PORT, MASTER_PORT, master_port
from deploy.doctor.finding import Finding


def find_network_facts(config: Config | None) -> Iterator[Finding]:
    """The address for others, and whether the ports that a config fixes are free."""
    address = address_for_others()
    name = interface_of(address) or "no interface"
    others = ", ".join(name for _, name in socket.if_nameindex())
    several_hosts = config is not None and config.cluster.training_nodes > 1
    if is_loopback(address):
        found = f"loopback only ({others})"
        if several_hosts:
            yield Finding("network", "fault", found, "connect this host to the network of cluster.training_nodes")
        else:
            yield Finding("network", "note", found)
    else:
        yield Finding("network", "ok", f"{address} on {name} (interfaces {others})")
    yield _own_name()
    for key, host, port in _ports(config):
        yield port_finding(key, host, port)


def _ports(config: Config | None) -> Sequence[tuple[str, str, int]]:
    """(key, address to bind, port) of each port that is not chosen at start."""
    if config is None:
        return [("cluster launchers' fleet endpoint", "", FLEET_PORT), ("torchrun", "", MASTER_PORT)]
    ports = [("pool.fleet_address", config.pool.fleet_host, config.pool.fleet_port)]
    if config.cluster.training_nodes > 1:
        ports.append(("torchrun", "", master_port(config.pool.fleet_port)))
    return [each for each in ports if each[2]]


def port_finding(key: str, host: str, port: int) -> Finding:
    """Whether a server could listen at `host`:`port` now; an empty host means all addresses."""
    where = f"{host or '*'}:{port}"
    try:
        with bound(host or "0.0.0.0", port) as probe:
            probe.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            remedy = f"ss -ltnp 'sport = :{port}' shows by whom: end it, or set {key} to another port"
            return Finding(f"port {port}", "fault", f"{where} ({key}) is taken", remedy)
        remedy = missing_loopback(host, f"the host of {key}") or f"set {key} to what this user may bind"
        return Finding(f"port {port}", "fault", f"{where} ({key}): {error.strerror or error}", remedy)
    return Finding(f"port {port}", "ok", f"{where} ({key}) is free")


def _own_name() -> Finding:
    name = socket.gethostname()
    try:
        address = addresses_of(name, None, socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return Finding("host name", "warning", f"{name} does not resolve", f"echo '127.0.1.1 {name}' >> /etc/hosts")
    return Finding("host name", "ok", f"{name} is {address}")
