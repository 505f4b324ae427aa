"""What launchers read of a run's fleet, at the trainer's endpoint."""

import json
from pathlib import Path
from typing import Final

from async_rl.errors import NoAnswer
from async_rl.net.http_client import HttpClient
from async_rl.protocol.fleet import FleetInfo
from async_rl.protocol.routes import FLEET
from deploy.cluster.restarts import num_trained

ADDRESS_FILE: Final = "fleet.json"
TIMEOUT_S: Final = 5.0


def read_fleet(run_dir: Path, token: str | None) -> FleetInfo | None:
    """The fleet of a run; None while no trainer answers, or where it does not accept the token."""
    try:
        url = str(json.loads((run_dir / ADDRESS_FILE).read_text())["url"])
        answer = HttpClient(url, TIMEOUT_S, token).get(FLEET)
        return FleetInfo.model_validate_json(answer.body) if answer.is_success else None
    except (OSError, ValueError, KeyError, NoAnswer):
        return None


def num_trained_with(run_dir: Path, instance: str, token: str | None) -> int:
    """`num_trained` for the instance of that name; 0 while the fleet does not know it, or does not answer."""
    fleet = read_fleet(run_dir, token)
    urls = {info.url for info in fleet.instances if info.name == instance} if fleet else set()
    return num_trained(run_dir, urls.__contains__) if urls else 0
