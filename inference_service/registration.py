"""Registers this instance with a trainer's fleet endpoint periodically, and requests to leave before it ends.

`server.py` starts it when the instance accepts requests. It runs in its own thread, so that a slow or absent trainer
never delays a response.
"""

import logging
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from async_rl.errors import ConfigError, FleetLost, NoAnswer
from async_rl.shared.net.http_client import HttpClient, HttpResponse
from async_rl.shared.protocol.body import ErrorResponse
from async_rl.shared.protocol.fleet import (
    ADDRESS_FILE,
    FleetAddress,
    NameRequest,
    RegisterRequest,
    RegisterResponse,
    read_address,
)
from async_rl.shared.protocol.routes import FLEET_DRAIN, FLEET_REGISTER, OTHER_RUN
from inference_service.identity import new_boot_id


class FleetLocation:
    """`register` is a URL or a run's directory, which need not exist yet. A directory is read anew each time, so a
    trainer that was started again on another host is found.

    Raises:
        ConfigError: it is neither.
    """

    def __init__(self, register: str) -> None:
        is_path = "://" not in register and ("/" in register or Path(register).is_dir())
        self._run_dir = Path(register) if is_path else None
        url = "" if is_path else _require_url(register, f"--register {register!r}")
        self._address = FleetAddress(url=url)

    def address(self) -> FleetAddress:
        """The endpoint's address, as far as it is known now.

        Raises:
            NoAnswer: no trainer has written it to the run's directory.
        """
        if self._run_dir is None:
            return self._address
        file = self._run_dir / ADDRESS_FILE
        try:
            found = read_address(self._run_dir)
            return FleetAddress(url=_require_url(found.url, f"the url in {str(file)!r}"), run=found.run)
        except FileNotFoundError as error:
            raise NoAnswer(f"{str(file)!r} does not exist: no trainer listens") from error
        except (OSError, ValueError) as error:
            raise NoAnswer(f"{str(file)!r} does not hold the address of a fleet: {error}") from error


def _require_url(url: str, what: str) -> str:
    """
    Raises:
        ConfigError: it is none; without a slash at its end otherwise.
    """
    if not re.match(r"https?://[^\s/]+", url):
        raise ConfigError(f"{what}: expected the trainer's fleet endpoint, as http://host:port, or the run's directory")
    try:
        _ = urlsplit(url).port
    except ValueError as error:
        raise ConfigError(f"{what}: {error}; expected http://host:port") from error
    return url.rstrip("/")


logger = logging.getLogger("inference_service")

FIRST_INTERVAL_S: Final = 2.0
"""Between registrations until a response contains the interval."""

MAX_INTERVAL_S: Final = 60.0
LEAVING_INTERVAL_S: Final = 0.25
"""Between registrations while the instance waits to leave; also the minimum interval."""

TIMEOUT_S: Final = 5.0


class Registration:
    """Registers an instance with the fleet at `register`, a URL or a run's directory, while it runs.

    The trainer may start and end at any time, and on any host that writes to the directory; only changes are logged.
    `leave_requested` is set when the instance may end: its fleet has released it, or no fleet has answered for
    `patience_s` (None: no limit), which `require_fleet` tells apart.

    Args:
        own_url: the instance's, or a function that makes it from the fleet's URL.
        wait: until an event, for so many seconds of the clock at most; whether it has happened.

    Raises:
        ConfigError: a URL, the name or the token is not valid.
    """

    def __init__(
        self,
        register: str,
        own_url: str | Callable[[str], str],
        name: str | None = None,
        token: str | None = None,
        boot_id: str | None = None,
        patience_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        self._clock, self._wait = clock, wait
        self._location = FleetLocation(register)
        self._own_url = (lambda fleet_url: own_url) if isinstance(own_url, str) else own_url
        self._name, self._token, self._boot_id = name, token, boot_id or new_boot_id()
        self._register_option = register
        self._patience_s = patience_s
        self._waited_s = 0.0
        self._has_answered = False
        self._interval_s = FIRST_INTERVAL_S
        self._state: str | None = None
        self._fleet: _Fleet | None = None
        self.leave_requested = threading.Event()
        with suppress(NoAnswer):
            self._find_fleet()

    @property
    def own_url(self) -> str | None:
        """What the present fleet is told; None while no fleet is known."""
        return None if self._fleet is None else self._fleet.body.url

    def require_fleet(self) -> None:
        """
        Raises:
            FleetLost: the instance may end since no fleet has answered for its patience.
        """
        if self._patience_s is not None and self._waited_s > self._patience_s:
            raise FleetLost(
                f"no fleet has answered at --register {self._register_option} for --patience-s {self._patience_s:g}: "
                f"this instance ends; start it again when there is a trainer; the last try: {self._state}"
            )

    def start(self) -> None:
        """Starts registering immediately, in a daemon thread."""
        thread = f"registration of {self._name or self._boot_id}"
        threading.Thread(target=self._run, name=thread, daemon=True).start()

    def leave(self, timeout_s: float) -> bool:
        """Requests a drain and waits until the fleet releases the instance; False if it does not, or does not respond.

        The instance must continue serving meanwhile, so that requests in flight can finish.
        """
        try:
            fleet = self._find_fleet()
            logger.info("asking the fleet at %s for leave", fleet.url)
            fleet.post(FLEET_DRAIN, NameRequest(name=fleet.body.name))
        except (NoAnswer, ConfigError, _Refused) as error:
            logger.warning("no fleet drains this instance: %s", error)
            return False
        deadline = self._clock() + timeout_s
        while self._register() and not self._wait(self.leave_requested, LEAVING_INTERVAL_S):
            if self._clock() > deadline:
                logger.warning("the fleet at %s has not let the instance go within %g s", fleet.url, timeout_s)
                break
        return self.leave_requested.is_set()

    def _run(self) -> None:
        while not self.leave_requested.is_set():
            begun_s, self._has_answered = self._clock(), False
            self._register()
            self._wait(self.leave_requested, self._interval_s)
            # Time in which this process itself was stopped does not count.
            waited_s = min(self._clock() - begun_s, self._interval_s + TIMEOUT_S)
            self._waited_s = 0.0 if self._has_answered else self._waited_s + waited_s
            if self._patience_s is not None and self._waited_s > self._patience_s:
                self.leave_requested.set()

    def _register(self) -> bool:
        """Registers once; whether the fleet accepted."""
        where = f"--register {self._register_option}"
        try:
            fleet = self._find_fleet()
            where = fleet.url
            answer = RegisterResponse.model_validate_json(fleet.post(FLEET_REGISTER, fleet.body))
        except _Refused as error:
            self._has_answered = error.is_of_its_fleet
            self._note(f"the fleet at {where} refused: {error}{error.remedy}", logging.WARNING)
        except ConfigError as error:
            # The trainer has moved to a host that this instance's address does not fit.
            self._note(str(error), logging.WARNING)
        except (NoAnswer, ValidationError) as error:
            self._note(f"no fleet answers at {where}, trying on: {error}", logging.INFO)
        else:
            self._has_answered = True
            self._interval_s = min(max(answer.interval_s, LEAVING_INTERVAL_S), MAX_INTERVAL_S)
            if answer.leave:
                self._note(f"the fleet at {where} has let {fleet.body.name} go", logging.INFO)
                self.leave_requested.set()
            else:
                self._note(f"registered with the fleet at {where} as {fleet.body.name}", logging.INFO)
            return True
        return False

    def _find_fleet(self) -> "_Fleet":
        """
        Raises:
            NoAnswer: there is none at present.
            ConfigError: the instance cannot be registered there.
        """
        address = self._location.address()
        if self._fleet is None or self._fleet.address != address:
            own_url = self._own_url(address.url).rstrip("/")
            body = _request(own_url, self._name or default_name(own_url), self._boot_id)
            self._fleet = _Fleet(address, body, HttpClient(address.url, TIMEOUT_S, self._token, address.run))
        return self._fleet

    def _note(self, state: str, level: int) -> None:
        if state != self._state:
            self._state = state
            logger.log(level, "%s", state)


@dataclass(frozen=True, slots=True)
class _Fleet:
    """A fleet endpoint, and what this instance tells it."""

    address: FleetAddress
    body: RegisterRequest
    http: HttpClient

    @property
    def url(self) -> str:
        return self.address.url

    def post(self, path: str, body: BaseModel) -> bytes:
        """
        Raises:
            NoAnswer: see `HttpClient`.
            _Refused: it responded with an error.
        """
        answer = self.http.post(path, body)
        if not answer.is_success:
            raise _Refused(answer)
        return answer.body


def _request(own_url: str, name: str, boot_id: str) -> RegisterRequest:
    try:
        return RegisterRequest(url=own_url, name=name, boot_id=boot_id)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"cannot register with this {first['loc'][0]}: {first['input']!r}; expected --advertise as "
            "http://host:port, and a --name of letters, digits, '.', '_' and '-'"
        ) from error


def default_name(url: str) -> str:
    """Host and port, in the characters allowed in a name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", url.split("://", 1)[-1]).strip("-")[:128]


class _Refused(Exception):
    """The fleet responded with an error; the text is its status and message."""

    def __init__(self, answer: HttpResponse) -> None:
        self.is_of_its_fleet = False
        """Another program may listen at the address of a trainer that has ended."""
        try:
            error = ErrorResponse.model_validate_json(answer.body).error
        except ValidationError:
            words = answer.reason
        else:
            words = error.message
            self.is_of_its_fleet = error.param != OTHER_RUN
        super().__init__(f"{answer.status} {words}")
        differs = answer.status == HTTPStatus.UNAUTHORIZED
        self.remedy = "; does ASYNC_RL_TOKEN differ from the trainer's?" if differs else ""
