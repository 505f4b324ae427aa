"""What the launcher asks the trainer's fleet endpoint: how many instances it desires, and to drain one."""

import json
from pathlib import Path

from pydantic import ValidationError

from async_rl.errors import NoAnswer
from async_rl.net.http_client import HttpClient
from async_rl.protocol.fleet import FleetInfo, NameRequest
from async_rl.protocol.routes import FLEET, FLEET_DRAIN

ADDRESS_FILE = "fleet.json"
TIMEOUT_S = 2.0
"""The launcher watches its tasks meanwhile no longer than this."""


class Fleet:
    """The fleet endpoint of the run in `run_dir`, wherever its trainer runs at the time of a call.

    Raises:
        ConfigError: the token is not valid in a header; by the first call.
    """

    def __init__(self, run_dir: Path, token: str | None) -> None:
        self._address_file = run_dir / ADDRESS_FILE
        self._token = token

    def desired_instances(self) -> int | None:
        """How many instances would balance the pools; None if the trainer does not know yet, or does not answer."""
        client = self._client()
        if client is None:
            return None
        try:
            answer = client.get(FLEET)
            return FleetInfo.model_validate_json(answer.body).desired_instances if answer.is_success else None
        except (NoAnswer, ValidationError):
            return None

    def drain(self, name: str) -> bool:
        """Asks for the instance to finish what it has and to end; whether the fleet agreed."""
        client = self._client()
        try:
            return client is not None and client.post(FLEET_DRAIN, NameRequest(name=name)).is_success
        except NoAnswer:
            return False

    def _client(self) -> HttpClient | None:
        try:
            url = json.loads(self._address_file.read_text())["url"]
        except (OSError, ValueError):
            return None  # No trainer listens.
        return HttpClient(url, TIMEOUT_S, self._token)
