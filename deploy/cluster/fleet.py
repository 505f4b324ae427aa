"""What launchers read of a run's fleet, and tell it, at the trainer's endpoint."""

import json
import time
from pathlib import Path
from typing import Final

from async_rl.errors import NoAnswer, RunDirInUse
from async_rl.net.http_client import HttpClient
from async_rl.protocol.fleet import FleetInfo, NameRequest
from async_rl.protocol.routes import FLEET, FLEET_DRAIN
from async_rl.tracking.lease import read_term
from deploy.cluster.restarts import num_trained

ADDRESS_FILE: Final = "fleet.json"
TIMEOUT_S: Final = 5.0
POLL_S: Final = 0.2

NO_ADDRESS: Final = (OSError, ValueError, KeyError, TypeError)
"""What reading the address raises where no trainer has written one."""


def read_fleet(run_dir: Path, token: str | None) -> FleetInfo | None:
    """The fleet of a run; None while no trainer answers, or where it does not accept the token."""
    try:
        answer = _client(run_dir, token).get(FLEET)
        return FleetInfo.model_validate_json(answer.body) if answer.is_success else None
    except (*NO_ADDRESS, NoAnswer):
        return None


def require_no_trainer(run_dir: Path, token: str | None) -> None:
    """Two launches of a run would share its records and the names of its instances; wherever the other one is.

    Raises:
        RunDirInUse: a trainer of the run answers.
    """
    if read_fleet(run_dir, token) is not None and _is_renewed(run_dir):
        raise RunDirInUse(
            f"a trainer of run.dir {str(run_dir)!r} answers, see `async-rl status`: end that run, or name another "
            "directory"
        )


def drain(run_dir: Path, name: str, token: str | None) -> bool:
    """Asks for an instance to finish what it has and to end; whether the fleet agreed."""
    try:
        return _client(run_dir, token).post(FLEET_DRAIN, NameRequest(name=name)).is_success
    except (*NO_ADDRESS, NoAnswer):
        return False


def num_trained_with(run_dir: Path, instance: str, token: str | None) -> int:
    """`num_trained` for the instance of that name; 0 while the fleet does not know it, or does not answer."""
    fleet = read_fleet(run_dir, token)
    urls = {info.url for info in fleet.instances if info.name == instance} if fleet else set()
    return num_trained(run_dir, urls.__contains__) if urls else 0


def _is_renewed(run_dir: Path) -> bool:
    """Whether a trainer keeps the run's lease; at the address of one that was killed, another run's may listen."""
    term = read_term(run_dir)
    deadline_s = time.monotonic() + (0.0 if term is None else term.ttl_s)
    while time.monotonic() < deadline_s:
        if read_term(run_dir) != term:
            return True
        time.sleep(POLL_S)
    return False


def _client(run_dir: Path, token: str | None) -> HttpClient:
    """A client of the trainer that listens now, wherever it runs.

    Raises:
        NO_ADDRESS
    """
    return HttpClient(str(json.loads((run_dir / ADDRESS_FILE).read_text())["url"]), TIMEOUT_S, token)
