"""A run's address file may lead to the trainer of another run, where its own was killed: nobody may take the two for
one another."""

import json
from pathlib import Path

import pytest

from async_rl.config.pool_section import PoolSection
from async_rl.errors import ConfigError, FleetLost
from async_rl.rollouts.fleet.endpoint import FleetClient, find_endpoint
from async_rl.rollouts.fleet.server import FleetServer
from async_rl.shared.protocol.fleet import FleetAddress, NameRequest, read_address
from async_rl.shared.protocol.routes import FLEET_REMOVE, RUN_HEADER
from deploy.cluster.fleet import drain, read_fleet
from inference_service.registration import Registration
from tests.support.fleet_endpoint import Endpoint

A = "http://10.0.0.1:8000"
OWN, OTHER = "0123456789abcdef", "fedcba9876543210"


@pytest.fixture
def servers(make_pool, loop, tmp_path: Path):
    """The endpoint of a run, and the directory of another one that names the same address."""
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir(), other.mkdir()
    server = FleetServer(make_pool(A), PoolSection(), None, own, run=OWN)
    loop.run(server.start())
    (other / "fleet.json").write_text(json.dumps({"url": server.url, "run": OTHER}))
    yield server, own, other
    loop.run(server.stop())
    assert not (own / "fleet.json").exists()


def test_requests_for_another_run_are_refused_and_change_nothing(servers) -> None:
    server, own, other = servers
    assert read_address(own) == FleetAddress(url=server.url, run=OWN)
    address = find_endpoint(None, other)
    client = FleetClient(address.url, None, address.run)
    with pytest.raises(ConfigError, match=f"the fleet endpoint of run {OWN}, the request is for run {OTHER}"):
        client.post(FLEET_REMOVE, NameRequest(name=A))
    with pytest.raises(ConfigError, match="its trainer does not listen here any more"):
        client.info()
    assert read_fleet(other, None) is None and not drain(other, A, None)
    fleet = read_fleet(own, None)
    assert fleet is not None and [info.state for info in fleet.instances] == ["joining"]


def test_an_instance_does_not_join_the_run_that_has_taken_its_trainers_port(servers) -> None:
    """And such answers are none: its patience ends."""
    server, own, other = servers
    lost = Registration(str(other), A.replace("1:", "2:"), "lost", patience_s=1.5)
    lost.start()
    assert lost.leave_requested.wait(20)
    with pytest.raises(FleetLost, match=f"the last try: .* refused: 409 this is the fleet endpoint of run {OWN}"):
        lost.require_fleet()
    for register in (str(own), server.url):
        registration = Registration(register, A.replace("1:", "3:"), "found")
        registration.start()
        client = FleetClient(server.url, None)
        while "found" not in (names := [info.name for info in client.info().instances]):
            assert "lost" not in names
        assert client.post(FLEET_REMOVE, NameRequest(name="found")).state == "dead"
        assert registration.leave_requested.wait(20)


@pytest.mark.parametrize("told", ["", "x", OWN.upper(), "\xff", "1" * 5000])
def test_any_other_header_is_another_run(servers, told: str) -> None:
    server, _, _ = servers
    assert Endpoint(server, None).ask("/fleet", **{RUN_HEADER: told})[0] == 409
    assert Endpoint(server, None).ask("/fleet", **{RUN_HEADER: OWN})[0] == 200
