"""Which address of this host leads where, as far as one host can show it; tests/multihost has several."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.errors import ConfigError
from async_rl.shared.net import local_address
from async_rl.shared.net.listener import listen
from async_rl.shared.net.local_address import (
    LOOPBACK,
    address_for_others,
    address_towards,
    choose_interface,
    choose_interface_towards,
    interface_of,
    is_loopback,
    leads_to_this_host,
)
from benchmarks.common.hosts import why_not
from tests.support import ROOT
from tests.support.tiers import at_night


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("127.0.1.1", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("fe80::1%eth0", False),
        ("::1%lo", True),
    ],
)
def test_loopback_is_told_by_the_address_and_not_by_its_zone(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "localhost"])
def test_the_way_to_this_host_is_loopback(host: str) -> None:
    assert is_loopback(address_towards(host)) and leads_to_this_host(host)


def test_every_address_of_this_hosts_interfaces_leads_to_it() -> None:
    found = list(local_address._interfaces())
    assert ("lo", LOOPBACK) in found
    for name, address in found:
        assert interface_of(address) == name and leads_to_this_host(address)
        assert address_towards(address) == address or is_loopback(address_towards(address))


def test_interfaces_are_found_by_ipv6_addresses_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listed = tmp_path / "if_inet6"
    listed.write_text(
        "fe8000000000000000fc00fffe000001 04 40 20 80     eth7\n"
        "fd00000a000000000000000000000002 04 40 00 82     eth7\n"
        "00000000000000000000000000000001 01 80 10 80       lo\n"
    )
    monkeypatch.setattr(local_address, "IPV6_ADDRESSES", listed)
    for written in ("fd00:a::2", "FD00:A:0:0:0:0:0:2", "fd00:a::2%eth7"):
        assert interface_of(written) == "eth7"
    assert interface_of("::1") == "lo" and interface_of("fd00:a::3") is None
    assert interface_of("fe80::fc:ff:fe00:1") is None, "any interface may have it"
    environment: dict[str, str] = {}
    choose_interface("nccl", "fd00:a::2", environment)
    assert environment == {"NCCL_SOCKET_IFNAME": "=eth7"}
    monkeypatch.setattr(local_address, "IPV6_ADDRESSES", tmp_path / "none")
    assert interface_of("fd00:a::2") is None and interface_of(LOOPBACK) == "lo"


@pytest.mark.parametrize("host", ["trainer..lan", "a" * 64, "a" * 300, ".", "trainer." + "a" * 64])
def test_what_can_be_no_name_is_an_os_error(host: str) -> None:
    for ask in (address_towards, leads_to_this_host):
        with pytest.raises(OSError):
            ask(host)
    with pytest.raises(ConfigError, match="--host"):
        listen("a server", host, 0, None)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "", "256.0.0.1"])
def test_a_name_without_an_address_is_an_os_error(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    for ask in (address_towards, leads_to_this_host):
        with pytest.raises(OSError, match="not known"):
            ask(host)


def test_the_last_problem_is_told_where_no_address_has_a_route(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("255.255.255.255", 9))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: known)
    with pytest.raises(OSError):
        address_towards("x")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [])
    with pytest.raises(OSError, match="'x' has no address"):
        address_towards("x")


@pytest.mark.parametrize(
    ("interfaces", "expected"),
    [([("lo", LOOPBACK)], LOOPBACK), ([("lo", LOOPBACK), ("eth1", "10.0.0.7")], "10.0.0.7"), ([], LOOPBACK)],
)
def test_without_a_default_route_another_hosts_way_is_the_first_address_that_is_not_loopback(
    interfaces: list[tuple[str, str]], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_route(host: str, port: int = 9) -> str:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(local_address, "address_towards", no_route)
    monkeypatch.setattr(local_address, "_interfaces", lambda: iter(interfaces))
    assert address_for_others() == expected


@pytest.mark.parametrize(
    ("backend", "before", "after"),
    [
        ("gloo", {}, {}),
        ("nccl", {}, {"NCCL_SOCKET_IFNAME": "=lo"}),
        ("nccl", {"NCCL_SOCKET_IFNAME": "ib0"}, {"NCCL_SOCKET_IFNAME": "ib0"}),
        ("hccl", {}, {"HCCL_IF_IP": LOOPBACK}),
        ("hccl", {"HCCL_IF_IP": "10.0.0.1"}, {"HCCL_IF_IP": "10.0.0.1"}),
        ("hccl", {"HCCL_SOCKET_IFNAME": "eth1"}, {"HCCL_SOCKET_IFNAME": "eth1"}),
    ],
)
def test_a_backend_is_told_of_the_interface_unless_the_user_said_it(
    backend: str, before: dict[str, str], after: dict[str, str]
) -> None:
    choose_interface(backend, LOOPBACK, before)
    assert before == after


def test_an_address_of_no_interface_leaves_nccl_its_own_choice() -> None:
    environment: dict[str, str] = {}
    assert interface_of("203.0.113.7") is None
    choose_interface("nccl", "203.0.113.7", environment)
    assert environment == {}


@pytest.mark.parametrize(
    ("towards", "expected"),
    [("10.0.0.9", "eth1"), ("own-name", "eth2")],
    ids=["another host", "this host by a name for loopback"],
)
def test_ranks_take_the_interface_of_their_rendezvous_and_never_loopback(
    towards: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interfaces = [("lo", LOOPBACK), ("eth1", "10.0.0.7"), ("eth2", "10.1.0.7")]
    ways = {"10.0.0.9": "10.0.0.7", "own-name": LOOPBACK, local_address.ANY_REMOTE_ADDRESS: "10.1.0.7"}
    monkeypatch.setattr(local_address, "address_towards", lambda host, port=9: ways[host])
    monkeypatch.setattr(local_address, "_interfaces", lambda: iter(interfaces))
    environment: dict[str, str] = {}
    choose_interface_towards(towards, "nccl", environment)
    assert environment == {"GLOO_SOCKET_IFNAME": expected, "NCCL_SOCKET_IFNAME": f"={expected}"}
    told = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"}
    choose_interface_towards(towards, "nccl", told)
    assert told == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"}


TRIES = """
import sys
from async_rl.errors import ConfigError
from async_rl.shared.net.free_ports import free_ports
from async_rl.shared.net.listener import listen
from deploy.doctor.network import port_finding
from inference_service.__main__ import _bind
from inference_service.options import parse_options

for attempt in (
    lambda: listen("the fleet endpoint", sys.argv[1], 0, "pool.fleet_address"),
    lambda: listen("the dashboard", sys.argv[1], 0, None),
    lambda: _bind(parse_options(["--model", "m", "--host", sys.argv[1]])),
    lambda: free_ports(2, sys.argv[1]),
):
    try:
        print(attempt())
    except ConfigError as error:
        print(error)
print(port_finding("pool.fleet_address", sys.argv[1], 8600).remedy)
"""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("commands", "host", "other"),
    [
        (["ip link set lo up", "ip address del 127.0.0.1/8 dev lo"], "127.0.0.1", "::1"),
        at_night(["ip link set lo up", "ip address del ::1/128 dev lo"], "::1", "127.0.0.1"),
        at_night(["ip link set lo up", "ip address flush dev lo"], "127.0.0.1", None),
    ],
    ids=["only IPv6", "only IPv4", "neither"],
)
def test_who_lacks_an_address_of_loopback_is_told_what_helps(commands: list[str], host: str, other: str | None) -> None:
    """In a network namespace of its own; what is advised is done there, and helps."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)

    def tries(*more: str, at: str = host) -> list[str]:
        script = "; ".join([*commands, *more, 'exec "$@"'])
        command = ["unshare", "--net", "sh", "-ec", script, "sh", sys.executable, "-c", TRIES, at]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    said = tries()
    if other is None:
        assert all("loopback interface has no address" in line for line in said)
    else:
        fleet = "the host of pool.fleet_address"
        for line, setting in zip(said, (fleet, "--host", "--host", None, fleet), strict=True):
            assert f"loopback interface has {other} only" in line
            assert setting is None or f"set {setting} to '{other}'" in line
        assert not any("interface" in line for line in tries(at=other)[:3])
    advised = set(re.findall(r"`(ip [^`]*)`", "\n".join(said)))
    assert not any("interface" in line for line in tries(*advised)), advised
