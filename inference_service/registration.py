"""Registers this instance with a trainer's fleet endpoint periodically, and requests to leave before it ends.

`server.py` starts it when the instance accepts requests. It runs in its own thread, so that a slow or absent trainer
never delays a response.
"""

import logging
import re
import threading
import time
from http import HTTPStatus
from typing import Final

from pydantic import BaseModel, ValidationError

from async_rl.errors import ConfigError, NoAnswer
from async_rl.net.http_client import HttpClient, HttpResponse
from async_rl.protocol.body import ErrorResponse
from async_rl.protocol.fleet import NameRequest, RegisterRequest, RegisterResponse
from async_rl.protocol.routes import FLEET_DRAIN, FLEET_REGISTER
from inference_service.identity import new_boot_id

logger = logging.getLogger("inference_service")

FIRST_INTERVAL_S: Final = 2.0
"""Between registrations until a response contains the interval."""

MAX_INTERVAL_S: Final = 60.0
LEAVING_INTERVAL_S: Final = 0.25
"""Between registrations while the instance waits to leave; also the minimum interval."""

TIMEOUT_S: Final = 5.0


class Registration:
    """Registers the instance at `own_url` with the fleet endpoint at `fleet_url`, while it runs.

    The trainer may start and end at any time; only changes are logged. `leave_requested` is set when the fleet has
    released the instance: it was drained or removed there, and may end.

    Raises:
        ConfigError: a URL, the name or the token is not valid.
    """

    def __init__(
        self,
        fleet_url: str,
        own_url: str,
        name: str | None = None,
        token: str | None = None,
        boot_id: str | None = None,
    ) -> None:
        if not re.match(r"https?://[^\s/]+", fleet_url):
            raise ConfigError(f"--register {fleet_url!r}: expected the trainer's fleet endpoint, as http://host:port")
        own_url = own_url.rstrip("/")
        try:
            name, boot_id = name or default_name(own_url), boot_id or new_boot_id()
            self._body = RegisterRequest(url=own_url, name=name, boot_id=boot_id)
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(
                f"cannot register with this {first['loc'][0]}: {first['input']!r}; expected --advertise as "
                "http://host:port, and a --name of letters, digits, '.', '_' and '-'"
            ) from error
        self._http = HttpClient(fleet_url, TIMEOUT_S, token)
        self._fleet_url = self._http.base_url
        self._interval_s = FIRST_INTERVAL_S
        self._state: str | None = None
        self.leave_requested = threading.Event()

    def start(self) -> None:
        """Starts registering immediately, in a daemon thread."""
        threading.Thread(target=self._run, name=f"registration of {self._body.name}", daemon=True).start()

    def leave(self, timeout_s: float) -> bool:
        """Requests a drain and waits until the fleet releases the instance; False if it does not, or does not respond.

        The instance must continue serving meanwhile, so that requests in flight can finish.
        """
        logger.info("asking the fleet at %s for leave", self._fleet_url)
        try:
            self._post(FLEET_DRAIN, NameRequest(name=self._body.name))
        except (NoAnswer, _Refused) as error:
            logger.warning("the fleet at %s does not drain this instance: %s", self._fleet_url, error)
            return False
        deadline = time.monotonic() + timeout_s
        while self._register() and not self.leave_requested.wait(LEAVING_INTERVAL_S):
            if time.monotonic() > deadline:
                logger.warning("the fleet at %s has not let the instance go within %g s", self._fleet_url, timeout_s)
                break
        return self.leave_requested.is_set()

    def _run(self) -> None:
        self._register()
        while not self.leave_requested.wait(self._interval_s):
            self._register()

    def _register(self) -> bool:
        """Registers once; whether the fleet accepted."""
        try:
            answer = RegisterResponse.model_validate_json(self._post(FLEET_REGISTER, self._body))
        except _Refused as error:
            self._note(f"the fleet at {self._fleet_url} refused: {error}{error.remedy}", logging.WARNING)
        except (NoAnswer, ValidationError) as error:
            self._note(f"no fleet answers at {self._fleet_url}, trying on: {error}", logging.INFO)
        else:
            self._interval_s = min(max(answer.interval_s, LEAVING_INTERVAL_S), MAX_INTERVAL_S)
            if answer.leave:
                self._note(f"the fleet at {self._fleet_url} has let {self._body.name} go", logging.INFO)
                self.leave_requested.set()
            else:
                self._note(f"registered with the fleet at {self._fleet_url} as {self._body.name}", logging.INFO)
            return True
        return False

    def _post(self, path: str, body: BaseModel) -> bytes:
        answer = self._http.post(path, body)
        if not answer.is_success:
            raise _Refused(answer)
        return answer.body

    def _note(self, state: str, level: int) -> None:
        if state != self._state:
            self._state = state
            logger.log(level, "%s", state)


def default_name(url: str) -> str:
    """Host and port, in the characters allowed in a name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", url.split("://", 1)[-1]).strip("-")[:128]


class _Refused(Exception):
    """The fleet responded with an error; the text is its status and message."""

    def __init__(self, answer: HttpResponse) -> None:
        try:
            words = ErrorResponse.model_validate_json(answer.body).error.message
        except ValidationError:
            words = answer.reason
        super().__init__(f"{answer.status} {words}")
        differs = answer.status == HTTPStatus.UNAUTHORIZED
        self.remedy = "; does ASYNC_RL_TOKEN differ from the trainer's?" if differs else ""
