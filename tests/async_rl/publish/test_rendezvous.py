"""Where a trainer meets its instances."""

import pytest

from async_rl.errors import PublishError
from async_rl.publish.rendezvous import sender_address


def test_the_meeting_is_where_all_instances_reach_it() -> None:
    assert sender_address(None, ["127.0.0.1", "127.0.0.1"]) == "127.0.0.1"
    # An instance on this host reaches the other address too; one elsewhere does not reach loopback.
    assert sender_address(None, ["127.0.0.1", "127.0.0.1", "10.0.0.1"]) == "10.0.0.1"
    assert sender_address(None, ["10.1.0.1", "10.2.0.1", "127.0.0.1", "10.2.0.1"]) == "10.2.0.1"
    assert sender_address(None, ["::1", "fd00::2"]) == "fd00::2"
    assert sender_address(None, ["fe80::1%eth0"]) == "fe80::1%eth0"


def test_a_chosen_address_is_taken_unless_nobody_else_reaches_it() -> None:
    assert sender_address("10.9.9.9", ["10.0.0.1"]) == "10.9.9.9"
    assert sender_address("127.0.0.1", ["127.0.0.1"]) == "127.0.0.1"
    with pytest.raises(PublishError, match=r"master_address = '127\.0\.1\.1' .* begins at 10\.0\.0\.1: leave it out"):
        sender_address("127.0.1.1", ["127.0.0.1", "10.0.0.1"])
    with pytest.raises(PublishError, match="master_address = 'no such host'"):
        sender_address("no such host", ["127.0.0.1"])
