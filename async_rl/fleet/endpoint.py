"""How a program outside the run finds its fleet endpoint and asks it; for `async_rl.fleet.cli`."""

import json
import urllib.error
import urllib.request
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from async_rl.errors import AsyncRLError, ConfigError, UnknownInstance
from async_rl.protocol.body import ErrorResponse
from async_rl.protocol.fleet import FleetInfo, InstanceInfo
from async_rl.protocol.routes import FLEET

ADDRESS_FILE = "fleet.json"
"""In `run.dir` while the endpoint listens: `{"url": "http://host:port"}`."""

ADDRESS_FILES = f"runs/*/{ADDRESS_FILE}"
TIMEOUT_S = 10.0

Answer = TypeVar("Answer", bound=BaseModel)


class EndpointFailed(AsyncRLError):
    """The fleet endpoint did not answer, or with an error of its own."""


class FleetClient:
    """The endpoint at `url`, as the commands speak to it."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        # Without the proxies of the environment, which would be asked for the loopback address too.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def info(self) -> FleetInfo:
        """Who is there.

        Raises:
            ConfigError: the endpoint refuses the token.
            EndpointFailed: it does not answer.
        """
        return self._ask(FleetInfo, FLEET)

    def post(self, path: str, body: BaseModel) -> InstanceInfo:
        """Asks for a change; the answer is the instance it is about.

        Raises:
            ConfigError, UnknownInstance: the endpoint refuses, with its words.
            EndpointFailed: it does not answer.
        """
        return self._ask(InstanceInfo, path, body.model_dump_json().encode())

    def _ask(self, kind: type[Answer], path: str, body: bytes | None = None) -> Answer:
        try:
            request = urllib.request.Request(self.url + path, body, self._headers)
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                return kind.model_validate_json(answer.read())
        except urllib.error.HTTPError as error:
            raise self._error(error.code, error.read()) from error
        except ValidationError as error:
            raise EndpointFailed(
                f"{self.url}{path} answers something else: is it the fleet endpoint of a run?"
            ) from error
        except (OSError, HTTPException, ValueError) as error:
            # ValueError: what urllib says of brackets without an IPv6 address in them.
            cause = getattr(error, "reason", error)
            raise EndpointFailed(
                f"no fleet endpoint answers at {self.url}: {getattr(cause, 'strerror', None) or cause}; "
                "has the run ended? A running one writes its address to RUN_DIR/fleet.json"
            ) from error

    def _error(self, status: int, body: bytes) -> AsyncRLError:
        if status == HTTPStatus.UNAUTHORIZED:
            return ConfigError(f"{self.url} refused the token: set ASYNC_RL_TOKEN to that of the run")
        try:
            error = ErrorResponse.model_validate_json(body).error
        except ValidationError:
            return ConfigError(f"{self.url} answered {status}: is it the fleet endpoint of a run?")
        if status == HTTPStatus.NOT_FOUND:
            # Only an instance that is not there is a parameter's fault; else it is the route that is missing.
            no_route = f"{self.url} has no such route: is it the fleet endpoint of a run?"
            return ConfigError(no_route) if error.param is None else UnknownInstance(error.message)
        kind = ConfigError if status < HTTPStatus.INTERNAL_SERVER_ERROR else EndpointFailed
        return kind(error.message)


def find_endpoint(url: str | None, run_dir: Path | None) -> str:
    """The endpoint's URL: as given, or as the run wrote it; by default that of the newest run under ./runs.

    Raises:
        ConfigError: no run says where its endpoint is.
    """
    if url is not None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url!r} is not a URL: write http://host:port")
        return url
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
        return str(json.loads(file.read_text())["url"])
    except FileNotFoundError as error:
        raise ConfigError(f"{str(file)!r} does not exist: the run has ended, or this is not its directory") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{str(file)!r} does not hold the address of an endpoint: {error}; use --url URL") from error


def _written_s(file: Path) -> float:
    """When it was written; before all others, if it went a moment ago with its run."""
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return float("-inf")
