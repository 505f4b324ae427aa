"""This host's address on the route to another host, according to the kernel; both pools use it.

The host's own name is not reliable: Debian resolves it to 127.0.1.1, others to the network that was configured first.
"""

import errno
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path

LOOPBACK, LOOPBACK_6 = "127.0.0.1", "::1"

ANY_REMOTE_ADDRESS = "203.0.113.1"
"""In a network reserved for documentation, so it is routed like any other address of the internet."""

DISCARD_PORT = 9
SIOCGIFADDR = 0x8915
IFREQ_BYTES = 40
NAME_BYTES = 15
IPV6_ADDRESSES = Path("/proc/net/if_inet6")
"""Linux has no ioctl for them."""

AddressInfo = tuple[
    socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]
]
"""Family, kind, protocol, canonical name and address, as `socket.getaddrinfo` has them."""


def addresses_of(host: str, port: int | None, kind: socket.SocketKind) -> Sequence[AddressInfo]:
    """The addresses of a host, for sockets of a kind.

    Raises:
        OSError: the name is unknown, or can be none: Python reports the latter as a UnicodeError.
    """
    try:
        return socket.getaddrinfo(host, port, type=kind)
    except UnicodeError as error:
        raise socket.gaierror(socket.EAI_NONAME, f"{host!r} can be no host name: {error}") from error


def address_towards(host: str, port: int = DISCARD_PORT) -> str:
    """The local address from which this host connects to `host`; nothing is sent.

    Raises:
        OSError: the name is unknown, or there is no route.
    """
    problem: OSError | None = None
    for family, kind, proto, _, address in addresses_of(host, port, socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, proto) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as error:
            problem = error
    raise problem or OSError(f"{host!r} has no address")


def leads_to_this_host(host: str) -> bool:
    """Whether an address of `host` is one of our own.

    Raises:
        OSError: the name is unknown, or there is no route.
    """
    own = address_towards(host)
    known = addresses_of(host, DISCARD_PORT, socket.SOCK_DGRAM)
    return is_loopback(own) or own in {str(address[0]) for *_, address in known}


def address_for_others() -> str:
    """An address at which other hosts may reach this one, if none of them is known yet.

    That of the default route, else the first one that is not loopback; loopback if there is no other.
    """
    try:
        return address_towards(ANY_REMOTE_ADDRESS)
    except OSError:
        others = (address for _, address in _interfaces() if not is_loopback(address))
        return next(others, LOOPBACK)


def own_loopback() -> str:
    """The loopback address that this host has."""
    return LOOPBACK if _has(LOOPBACK) else LOOPBACK_6


def is_loopback(address: str) -> bool:
    """Whether only programs on this host can reach the address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def missing_loopback(host: str, setting: str | None = None) -> str | None:
    """What helps on a host whose loopback interface lacks the address `host`; None if that is not what is missing.

    Args:
        setting: that may name another address; None where `host` is fixed.
    """
    if host not in (LOOPBACK, LOOPBACK_6) or _has(host):
        return None
    other = LOOPBACK if host == LOOPBACK_6 else LOOPBACK_6
    prefix = 8 if host == LOOPBACK else 128
    give = f"give it {host} (`ip address add {host}/{prefix} dev lo`)"
    if not _has(other):
        return f"this host's loopback interface has no address: {give}"
    found = f"this host's loopback interface has {other} only: "
    return found + (give if setting is None else f"set {setting} to {other!r}, or {give}")


def _has(address: str) -> bool:
    """Whether a server could listen at an address of this host."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True


def is_unspecified(address: str) -> bool:
    """Whether the address stands for all interfaces of this host."""
    return ipaddress.ip_address(address.partition("%")[0]).is_unspecified


def interface_of(address: str) -> str | None:
    """The name of the network interface with this address; None if there is none."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    return next((name for name, own in _interfaces() if ipaddress.ip_address(own) == wanted), None)


def choose_interface(backend: str, address: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Lets nccl or hccl use the network of `address`, unless the environment names one.

    They read their variables when the process creates its first communicator, so an earlier choice stays.
    """
    interface = interface_of(address)
    if backend == "nccl" and interface is not None:
        # "=": exactly this name; otherwise it is a prefix of names.
        environment.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    if backend == "hccl" and "HCCL_SOCKET_IFNAME" not in environment:
        environment.setdefault("HCCL_IF_IP", address)


def choose_interface_towards(host: str, backend: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Lets gloo, and nccl or hccl for the device, use the network in which the ranks meet at `host`, unless the
    environment names one. By default gloo takes the address of this host's own name, which may be loopback.

    If `host` is this one under a name for loopback, the network is the one of the default route.

    Raises:
        OSError: the name is unknown, or there is no route.
    """
    address = address_towards(host)
    if is_loopback(address):
        address = address_for_others()
    if (interface := interface_of(address)) is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    choose_interface(backend, address, environment)


def _interfaces() -> Iterator[tuple[str, str]]:
    """Name and address of each network interface, once for each of its addresses; IPv4 first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack(f"{IFREQ_BYTES}s", name.encode()[:NAME_BYTES]))
            except OSError:
                continue
            yield name, socket.inet_ntoa(answer[20:24])
    with suppress(OSError):
        for line in IPV6_ADDRESSES.read_text().splitlines():
            digits, *_, name = line.split()
            address = ipaddress.IPv6Address(int(digits, 16))
            if not address.is_link_local:  # These mean something only together with an interface.
                yield name, str(address)
