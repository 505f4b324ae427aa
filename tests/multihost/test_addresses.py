"""Addresses by route, between hosts that are network namespaces of this machine."""

import sys
from collections.abc import Iterator

import pytest

from benchmarks.common.hosts import Hosts, why_not

pytestmark = pytest.mark.distributed

ROUTES = """
import sys
from async_rl.shared.net.local_address import *
towards = sys.argv[1]
environment = {}
choose_interface("nccl", address_towards(towards), environment)
choose_interface("hccl", address_towards(towards), environment)
print(address_towards(towards), address_for_others(), leads_to_this_host(towards), environment)
"""

REGISTRATION = """
import socket, sys
from inference_service.address import registration_of
from inference_service.options import parse_options
options = parse_options(["--model", "m", "--host", sys.argv[1], "--register", sys.argv[2]])
listener = socket.create_server((options.host, 0))
try:
    print(registration_of(options, listener, None, "boot-1").own_url.rpartition(":")[0])
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    hosts = Hosts(
        {"office": "/24", "data": "/24"},
        {
            "trainer": {"office": "10.77.1.1", "data": "10.77.2.1"},
            "both": {"office": "10.77.1.2", "data": "10.77.2.2"},
            "debian": {"none": "127.0.1.1", "data": "10.77.2.3"},
        },
    )
    yield hosts
    hosts.close()


def test_a_host_takes_the_address_and_the_interface_that_route_to_the_other_end(hosts: Hosts) -> None:
    def routes(name: str, towards: str) -> str:
        return hosts[name].ask(sys.executable, "-c", ROUTES, towards)

    data = "{'NCCL_SOCKET_IFNAME': '=data', 'HCCL_IF_IP': '10.77.2.%d'}"
    office = "{'NCCL_SOCKET_IFNAME': '=office', 'HCCL_IF_IP': '10.77.1.%d'}"
    # The host's own name says the office network, but that is not asked.
    assert routes("both", "10.77.2.3") == "10.77.2.2 10.77.1.2 False " + data % 2
    assert routes("both", "10.77.1.1") == "10.77.1.2 10.77.1.2 False " + office % 2
    assert routes("both", "both") == "10.77.1.2 10.77.1.2 True " + office % 2
    assert routes("debian", "10.77.2.1") == "10.77.2.3 10.77.2.3 False " + data % 3
    assert routes("debian", "debian").startswith("127.0.0.1 10.77.2.3 True ")


def test_an_instance_registers_the_address_at_which_the_trainer_reaches_it(hosts: Hosts) -> None:
    def registered(name: str, host: str, fleet: str) -> str:
        return hosts[name].ask(sys.executable, "-c", REGISTRATION, host, fleet)

    assert registered("both", "0.0.0.0", "http://10.77.2.1:9") == "http://10.77.2.2"
    assert registered("both", "0.0.0.0", "http://10.77.1.1:9") == "http://10.77.1.2"
    assert registered("debian", "0.0.0.0", "http://10.77.2.1:9") == "http://10.77.2.3"
    assert registered("debian", "0.0.0.0", "http://not-yet-known:9") == "http://10.77.2.3"
    assert registered("both", "10.77.1.2", "http://10.77.2.1:9") == "http://10.77.1.2", "as it was told"
    assert registered("both", "127.0.0.1", "http://10.77.1.2:9") == "http://127.0.0.1", "the trainer is on this host"
    refused = registered("both", "127.0.0.1", "http://10.77.2.1:9")
    assert refused.startswith("ConfigError --host 127.0.0.1 is reached from this host only") and "0.0.0.0" in refused
