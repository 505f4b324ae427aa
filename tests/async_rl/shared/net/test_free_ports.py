"""Ports that are free, and stay so until a process listens there."""

import socket
from contextlib import ExitStack

import pytest

from async_rl.errors import ConfigError
from async_rl.shared.net.free_ports import EPHEMERAL_PORTS, HIGHEST_PORT, LOWEST_PORT, free_ports
from tests.support.open_files import room_for_files


def test_more_instances_than_this_process_may_open_ports_for_are_an_error_with_a_remedy() -> None:
    with room_for_files(10):
        # Other threads of this process may open some of the ten.
        with pytest.raises(ConfigError, match=r"needs 50 free ports.* can have \d+ .*lower inference\.num_instances"):
            free_ports(50)
        assert len(set(free_ports(5))) == 5, "those of the failed attempt are closed"


def test_no_outgoing_connection_can_take_a_port_that_is_chosen() -> None:
    first, last = map(int, EPHEMERAL_PORTS.read_text().split())
    for outgoing in ((first, last), (20010, 30000), (HIGHEST_PORT - 100, HIGHEST_PORT), (1024, HIGHEST_PORT - 200)):
        ports = free_ports(50, outgoing=outgoing)
        assert len(set(ports)) == 50
        assert not any(outgoing[0] <= port <= outgoing[1] for port in ports)


def test_where_the_system_gives_nearly_every_port_away_others_are_chosen_too() -> None:
    ports = free_ports(50, outgoing=(1024, HIGHEST_PORT - 10))
    assert len(set(ports)) == 50 and min(ports) >= LOWEST_PORT


def test_ports_that_are_in_use_are_not_chosen() -> None:
    with ExitStack() as stack:
        free = free_ports(40, outgoing=(1024, HIGHEST_PORT - 50))
        for port in free:
            stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
        assert not set(free_ports(15, outgoing=(1024, HIGHEST_PORT - 50))) & set(free)
