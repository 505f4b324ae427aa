"""Finds and calls a run's fleet endpoint from another program; for `async_rl.rollouts.fleet.cli`."""

from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from async_rl.errors import AsyncRLError, ConfigError, NoAnswer, UnknownInstance
from async_rl.shared.net.http_client import HttpClient, HttpResponse
from async_rl.shared.protocol.body import ErrorResponse
from async_rl.shared.protocol.fleet import ADDRESS_FILE, FleetAddress, FleetInfo, InstanceInfo, read_address
from async_rl.shared.protocol.routes import FLEET

ADDRESS_FILES = f"runs/*/{ADDRESS_FILE}"
TIMEOUT_S = 10.0

Wanted = TypeVar("Wanted", bound=BaseModel)


class EndpointFailed(AsyncRLError):
    """The fleet endpoint did not respond, or responded with a server error."""


class FleetClient:
    """Client of the endpoint at `url`, for the commands; that of another run than `run`, if given, refuses them.

    Raises:
        ConfigError: the token is not valid in a header.
    """

    def __init__(self, url: str, token: str | None, run: str | None = None) -> None:
        self._http = HttpClient(url, TIMEOUT_S, token, run)
        self.url = self._http.base_url

    def info(self) -> FleetInfo:
        """The fleet's instances.

        Raises:
            ConfigError: the endpoint refuses the token.
            EndpointFailed: it does not respond.
        """
        return self._ask(FleetInfo, FLEET)

    def post(self, path: str, body: BaseModel) -> InstanceInfo:
        """Requests a change; returns the instance concerned.

        Raises:
            ConfigError, UnknownInstance: the endpoint refuses, with its message.
            EndpointFailed: it does not respond.
        """
        return self._ask(InstanceInfo, path, body)

    def _ask(self, kind: type[Wanted], path: str, body: BaseModel | None = None) -> Wanted:
        try:
            answer = self._http.get(path) if body is None else self._http.post(path, body)
        except NoAnswer as error:
            raise EndpointFailed(
                f"no fleet endpoint answers at {self.url}: {error}; "
                "has the run ended? A running one writes its address to RUN_DIR/fleet.json"
            ) from error
        if not answer.is_success:
            raise self._error(answer)
        try:
            return kind.model_validate_json(answer.body)
        except ValidationError as error:
            raise EndpointFailed(
                f"{self.url}{path} answers something else: is it the fleet endpoint of a run?"
            ) from error

    def _error(self, answer: HttpResponse) -> AsyncRLError:
        if answer.status == HTTPStatus.UNAUTHORIZED:
            return ConfigError(f"{self.url} refused the token: set ASYNC_RL_TOKEN to that of the run")
        try:
            error = ErrorResponse.model_validate_json(answer.body).error
        except ValidationError:
            return ConfigError(f"{self.url} answered {answer.status}: is it the fleet endpoint of a run?")
        if answer.status == HTTPStatus.NOT_FOUND:
            # Only for a missing instance a parameter is at fault; otherwise the route is missing.
            no_route = f"{self.url} has no such route: is it the fleet endpoint of a run?"
            return ConfigError(no_route) if error.param is None else UnknownInstance(error.message)
        kind = ConfigError if answer.status < HTTPStatus.INTERNAL_SERVER_ERROR else EndpointFailed
        return kind(error.message)


def find_endpoint(url: str | None, run_dir: Path | None) -> FleetAddress:
    """The endpoint's address: as given, or as written by the run; by default that of the newest run under ./runs.

    Raises:
        ConfigError: no run has written its endpoint's address.
    """
    if url is not None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url!r} is not a URL: write http://host:port")
        return FleetAddress(url=url)
    if run_dir is None:
        files = sorted(Path().glob(ADDRESS_FILES), key=_written_s)
        if not files:
            raise ConfigError(
                f"no run goes on under {str(Path().resolve())!r}: none of {ADDRESS_FILES} exists; "
                "name one with --run RUN_DIR, or its endpoint with --url URL"
            )
        run_dir = files[-1].parent
    file = run_dir / ADDRESS_FILE
    try:
        return read_address(run_dir)
    except FileNotFoundError as error:
        raise ConfigError(f"{str(file)!r} does not exist: the run has ended, or this is not its directory") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} does not hold the address of an endpoint: {error}; use --url URL") from error


def _written_s(file: Path) -> float:
    """When it was written; before all others, if it went a moment ago with its run."""
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return float("-inf")
