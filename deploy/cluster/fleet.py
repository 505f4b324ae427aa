"""What launchers read of a run's fleet, and tell it, at the trainer's endpoint."""

from pathlib import Path
from typing import Final

from async_rl.errors import NoAnswer, RunDirInUse
from async_rl.shared.net.http_client import HttpClient
from async_rl.shared.protocol.fleet import FleetInfo, NameRequest, read_address
from async_rl.shared.protocol.routes import FLEET, FLEET_DRAIN
from deploy.cluster.restarts import num_trained

TIMEOUT_S: Final = 5.0


def read_fleet(run_dir: Path, token: str | None) -> FleetInfo | None:
    """The fleet of a run; None while no trainer of it answers, or where it does not accept the token."""
    try:
        answer = _client(run_dir, token).get(FLEET)
        return FleetInfo.model_validate_json(answer.body) if answer.is_success else None
    except (OSError, ValueError, NoAnswer):
        return None


def require_no_trainer(run_dir: Path, token: str | None) -> None:
    """Two launches of a run would share its records and the names of its instances; wherever the other one is.

    Raises:
        RunDirInUse: a trainer of the run answers.
    """
    if read_fleet(run_dir, token) is not None:
        raise RunDirInUse(
            f"a trainer of run.dir {str(run_dir)!r} answers, see `async-rl status`: end that run, or name another "
            "directory"
        )


def drain(run_dir: Path, name: str, token: str | None) -> bool:
    """Asks for an instance to finish what it has and to end; whether the fleet agreed."""
    try:
        return _client(run_dir, token).post(FLEET_DRAIN, NameRequest(name=name)).is_success
    except (OSError, ValueError, NoAnswer):
        return False


def num_trained_with(run_dir: Path, instance: str, token: str | None) -> int:
    """`num_trained` for the instance of that name; 0 while the fleet does not know it, or does not answer."""
    fleet = read_fleet(run_dir, token)
    urls = {info.url for info in fleet.instances if info.name == instance} if fleet else set()
    return num_trained(run_dir, urls.__contains__) if urls else 0


def _client(run_dir: Path, token: str | None) -> HttpClient:
    """A client of the trainer that listens now, wherever it runs.

    Raises:
        OSError, ValueError: no trainer has written its address.
    """
    address = read_address(run_dir)
    return HttpClient(address.url, TIMEOUT_S, token, address.run)
