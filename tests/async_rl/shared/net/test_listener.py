"""Sockets of our own servers: where they cannot listen, and what is said then."""

import pytest

from async_rl.errors import ConfigError
from async_rl.shared.net.listener import listen


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
