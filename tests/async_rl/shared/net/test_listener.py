"""Sockets of our own servers: where they cannot listen, and what is said then."""

import socket

import pytest

from async_rl.errors import ConfigError
from async_rl.shared.net.free_ports import free_ports
from async_rl.shared.net.listener import bound, listen
from deploy.doctor.network import find_network_facts, port_finding
from inference_service.__main__ import _bind
from inference_service.options import parse_options
from tests.support.minimal_config import config_of


@pytest.fixture
def name_of_an_ipv6_address(monkeypatch: pytest.MonkeyPatch) -> str:
    """As hosts of networks without IPv4 have: `socket.bind` itself looks such a name up as an IPv4 address."""
    try:
        bound("::1", 0).close()
    except OSError:
        pytest.skip("this host has no IPv6")
    name, looked_up = "pod-1.example", socket.getaddrinfo

    def look_up(host, *arguments, **options):
        return looked_up("::1" if host == name else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    return name


def test_a_name_with_an_ipv6_address_alone_is_one_of_this_host(name_of_an_ipv6_address: str) -> None:
    (port,) = free_ports(1)
    with _bind(parse_options(["--model", "m", "--host", name_of_an_ipv6_address, "--port", "0"])) as instance:
        assert instance.getsockname()[0] == "::1"
    assert port_finding("pool.fleet_address", name_of_an_ipv6_address, port).state == "ok"
    several = config_of(cluster={"training_nodes": 2})
    assert "host name" in {fact.name for fact in find_network_facts(several) if fact.state == "ok"}


def test_an_ipv6_address_may_stand_in_the_brackets_of_a_url() -> None:
    assert parse_options(["--model", "m", "--host", "[::1]"]).host == "::1"
    config = config_of(publish={"master_address": "[fd00::1]"}, rollout={"options": {"gateway_host": "[::]"}})
    assert (config.publish.master_address, config.rollout.options.gateway_host) == ("fd00::1", "::")


@pytest.mark.parametrize("host", ["203.0.113.1", "no host", "a\u2028b", "x" * 70 + ".example", "a..b"])
def test_an_address_that_is_none_of_this_host_is_named_with_its_setting(host: str) -> None:
    with pytest.raises(
        ConfigError, match=r"the server cannot listen at .* \(pool\.fleet_address\): .*name an address of this"
    ):
        listen("the server", host, 0, "pool.fleet_address")


def test_a_port_that_is_taken_is_named_with_its_setting() -> None:
    with listen("the server", "127.0.0.1", 0, None) as server:
        port = int(server.getsockname()[1])
        with pytest.raises(ConfigError, match=f"--host = '127.0.0.1', --port = {port}: Address already in use"):
            listen("the server", "127.0.0.1", port, None)
