"""Under which address an instance is told to its fleet, and what it warns of; between hosts: `tests/multihost`."""

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from async_rl.errors import ConfigError
from inference_service.address import registration_of, url_of, warn_if_exposed
from inference_service.options import parse_options

FLEET = "http://127.0.0.1:9"


@contextmanager
def bound(host: str) -> Iterator[socket.socket]:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        yield listener


def registered(*arguments: str, host: str = "127.0.0.1") -> str | None:
    """The URL that the fleet would be told, `PORT` for the port."""
    options = parse_options(["--model", "m", "--host", host, *arguments])
    with bound(host) as listener:
        registration = registration_of(options, listener, None, "boot-1")
        port = str(listener.getsockname()[1])
    return None if registration is None else str(registration.own_url).replace(port, "PORT")


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", "http://127.0.0.1:"), ("::1", "http://[::1]:")])
def test_a_url_has_the_address_and_the_port_that_were_bound(host: str, expected: str) -> None:
    if ":" in host and not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    with bound(host) as listener:
        assert url_of(listener) == f"{expected}{listener.getsockname()[1]}"


def test_an_instance_without_a_fleet_registers_nowhere() -> None:
    assert registered() is None


def test_a_fleet_on_this_host_is_told_the_loopback_address() -> None:
    assert registered("--register", FLEET) == "http://127.0.0.1:PORT"
    assert registered("--register", FLEET, host="0.0.0.0") == "http://127.0.0.1:PORT"


def test_what_the_user_advertises_is_told_as_it_is() -> None:
    assert registered("--register", FLEET, "--advertise", "http://gate:80") == "http://gate:80"


@pytest.mark.parametrize("name", ["trainer.invalid", "trainer..lan"])
def test_a_fleet_whose_name_is_not_known_yet_does_not_keep_the_instance_from_starting(name: str) -> None:
    url = registered("--register", f"http://{name}:9", host="0.0.0.0")
    assert url is not None and url.endswith(":PORT") and "0.0.0.0" not in url
    assert registered("--register", f"http://{name}:9") == "http://127.0.0.1:PORT"


def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--register 'http://\[::1:9': .*; expected http://host:port"):
        registered("--register", "http://[::1:9")


@pytest.mark.parametrize(
    ("host", "token", "warning"),
    [
        ("127.0.0.1", None, None),
        ("localhost", None, None),
        ("::1", None, None),
        ("0.0.0.0", None, "--host 0.0.0.0 without ASYNC_RL_TOKEN: whoever reaches the port"),
        ("0.0.0.0", "s3cret", "the token and all answers cross the network as they are"),
    ],
)
def test_an_instance_that_others_reach_says_what_they_can_do(
    host: str, token: str | None, warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_if_exposed(host, token)
    assert (warning in caplog.text) if warning else not caplog.records
    assert "s3cret" not in caplog.text
