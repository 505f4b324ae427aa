"""Calls to one inference instance over HTTP, each with a response or an `InstanceError` that names the instance; for
`async_rl.rollouts.instance.client`.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import NoReturn, TypeVar

import aiohttp
from pydantic import BaseModel, TypeAdapter, ValidationError

from async_rl.errors import (
    ConnectionLost,
    Fenced,
    InstanceError,
    InstanceRefused,
    InstanceStalled,
    InstanceUnreachable,
    NeedsWeights,
    RequestInvalid,
)
from async_rl.rollouts.instance.answer_bytes import whole_body
from async_rl.rollouts.instance.connections import Connections
from async_rl.rollouts.instance.dialect import DEAD_ENGINE, IS_SLEEPING, SEQUENCE
from async_rl.shared.protocol import body, routes
from async_rl.shared.protocol.routes import BOOT_ID, BOOT_ID_HEADER
from async_rl.shared.protocol.sequence import Answer, Call, SequenceRequest, goes_on

CONNECT_TIMEOUT_S = 5.0
MAX_ERROR_CHARS = 500

MAX_BODY_BYTES = 2**24
"""Of the response to a control call: the metrics of a large server take a tenth of it."""

UNBOUNDED = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)

NO_SEQUENCES = (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED)
"""Of a server that does not have the route, or of one between that does not let it pass."""

STARTED = "started-"
"""Begins the boot id of a server that tells only when its process was started."""

START_TIME_METRIC = re.compile(rb"^process_start_time_seconds ([0-9.eE+]{1,40})(?:\s|$)", re.MULTILINE)

Body = TypeVar("Body")


class RouteMissing(InstanceRefused):
    """The server does not have this route."""


def within(timeout_s: float) -> aiohttp.ClientTimeout:
    """A timeout of the whole call, including its connection."""
    return aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(CONNECT_TIMEOUT_S, timeout_s))


class InstanceHttp:
    """Control calls to the instance at `url`, and the errors of failed calls of any kind."""

    def __init__(self, connections: Connections, url: str) -> None:
        self._connections = connections
        self._url = url
        self.takes_sequences = True
        """Whether the server carries out several calls in one round trip, as far as is known."""

    async def get(self, path: str, timeout_s: float) -> bytes:
        answer, _ = await self.exchange("GET", path, None, within(timeout_s))
        return answer

    async def post(self, path: str, body: BaseModel | None, timeout: aiohttp.ClientTimeout) -> bytes:
        answer, _ = await self.exchange("POST", path, body, timeout)
        return answer

    async def exchange(
        self, method: str, path: str, body: BaseModel | None, timeout: aiohttp.ClientTimeout
    ) -> tuple[bytes, Mapping[str, str]]:
        """Body and headers of the response.

        Raises:
            InstanceUnreachable, InstanceRefused, Fenced: see errors.py.
        """
        data = body.model_dump_json().encode() if body is not None else None
        status, answer, headers = await self._send(method, path, data, timeout)
        if status != HTTPStatus.OK:
            self.refuse(method, path, status, answer)
        return answer, headers

    async def _send(
        self, method: str, path: str, data: bytes | None, timeout: aiohttp.ClientTimeout
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """Status, body and headers of the response."""
        try:
            session = self._connections.control
            url = self._url + path
            async with session.request(method, url, data=data, timeout=timeout, allow_redirects=False) as response:
                answer = await whole_body(response.content, MAX_BODY_BYTES, self._url)
                if response.status >= 500:
                    # vLLM closes the connection after such a response without announcing it: it must not be reused.
                    response.close()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self.unreachable(method, path, error) from error
        return response.status, answer, response.headers

    async def in_order(
        self, calls: Sequence[Call], timeout: aiohttp.ClientTimeout
    ) -> tuple[list[Answer], Mapping[str, str]]:
        """The answers of `calls`, up to the one that ends the sequence, and the headers of the response with the last:
        in one round trip, or one after the other where the server does not take several; see
        `async_rl.shared.protocol.sequence`.

        Raises:
            InstanceUnreachable, InstanceRefused, Fenced: see errors.py; not for a call that is refused, whose answer
                says so.
            InstanceError: the answers are not those of a sequence.
        """
        if self.takes_sequences:
            path = routes.SEQUENCE
            try:
                answer, headers = await self.exchange("POST", path, SequenceRequest(calls=list(calls)), timeout)
            except InstanceRefused as error:
                if error.status not in NO_SEQUENCES:
                    raise
                self.takes_sequences = False
            else:
                answers = self.parse(SEQUENCE, answer, path).answers
                *earlier, last = [goes_on(call, each) for call, each in zip(calls, answers, strict=False)] or [True]
                if len(answers) > len(calls) or not all(earlier) or (last and len(answers) < len(calls)):
                    raise InstanceError(
                        f"instance {self._url} answered {len(calls)} calls of {path} by {len(answers)}: expected one "
                        "for each, up to the first that ends them"
                    )
                return answers, headers
        answers, headers = [], {}
        for call in calls:
            data = None if call.body is None else call.body.encode()
            status, answer, headers = await self._send(call.method, call.path, data, timeout)
            answers.append(Answer(status=status, body=answer.decode(errors="replace")))
            if not goes_on(call, answers[-1]):
                break
        return answers, headers

    def require(self, call: Call, answer: Answer) -> None:
        """Raises as `refuse` for a call that was refused."""
        if answer.status != HTTPStatus.OK:
            self.refuse(call.method, call.path, answer.status, answer.body.encode())

    def unreachable(self, method: str, path: str, error: Exception) -> InstanceUnreachable:
        """The error for a call without a response."""
        why = str(error) or type(error).__name__
        kind = InstanceUnreachable if isinstance(error, TimeoutError) else ConnectionLost
        return kind(f"instance {self._url} did not answer {method} {path}: {why}")

    def refuse(self, method: str, path: str, status: int, answer: bytes) -> NoReturn:
        """Raises for a response that is not 200: InstanceRefused, RequestInvalid, RouteMissing, NeedsWeights,
        InstanceStalled or Fenced."""
        info = _error_info(answer)
        reason = info.message[:MAX_ERROR_CHARS] if info is not None else None
        if reason is not None and DEAD_ENGINE in reason:
            raise InstanceStalled(f"the engine of instance {self._url} has died: {reason}")
        if status == 409 and info is not None and info.param == routes.SUPERSEDED_TERM:
            raise Fenced(f"instance {self._url} serves the trainer that has taken over this run: {reason}")
        kind: type[InstanceRefused] = RequestInvalid if status in (400, 413, 422) else InstanceRefused
        # 403: the route is disabled. 404 without an error body: there is no such route (an unknown model has one).
        if status == 403 or (status == 404 and info is None):
            kind = RouteMissing
        elif status == 503 and info is not None and info.param == routes.NEEDS_WEIGHTS:
            kind = NeedsWeights
        raise kind(
            f"instance {self._url} refused {method} {path} with {status}: "
            + (reason or answer[:MAX_ERROR_CHARS].decode(errors="replace") or "(empty body)"),
            status,
        )

    def boot_id(self, headers: Mapping[str, str]) -> str | None:
        """Which process a response's headers name, if they do.

        Raises:
            InstanceError: what they have cannot be a name: others would be shown it, and asked to compare it.
        """
        boot_id = headers.get(BOOT_ID_HEADER)
        if boot_id is not None and not re.fullmatch(BOOT_ID, boot_id):
            raise InstanceError(
                f"instance {self._url} sends {BOOT_ID_HEADER} {boot_id!r:.100}: expected at most 64 letters, digits "
                "and hyphens; something between may change its headers"
            )
        return boot_id

    async def start_time(self, timeout_s: float) -> str | None:
        """When the server's process was started, from its metrics, as a boot id; None if they do not report it."""
        try:
            found = START_TIME_METRIC.search(await self.get(routes.METRICS, timeout_s))
        except InstanceRefused:
            return None
        return f"{STARTED}{found[1].decode()}" if found else None

    async def is_sleeping(self, timeout_s: float) -> bool:
        """See `InstanceClient.is_sleeping`."""
        path = routes.IS_SLEEPING
        try:
            return self.parse(IS_SLEEPING, await self.get(path, timeout_s), path)["is_sleeping"]
        except RouteMissing:
            return False

    def parse(self, adapter: TypeAdapter[Body], answer: bytes, path: str) -> Body:
        """The body of a response.

        Raises:
            InstanceError: it does not conform to the protocol.
        """
        try:
            return adapter.validate_json(answer)
        except ValidationError as error:
            raise InstanceError(
                f"instance {self._url} answered {path} with a body of another protocol: {error}"
            ) from error


def _error_info(answer: bytes) -> body.ErrorInfo | None:
    """The content of an error body, or None if the body is not the protocol's."""
    try:
        return body.ErrorResponse.model_validate_json(answer).error
    except ValidationError:
        return None


@asynccontextmanager
async def while_it_progresses(last_progress_s: Callable[[], float], timeout_s: float) -> AsyncIterator[None]:
    """Raises TimeoutError in its body once `last_progress_s()`, a `time.monotonic()`, is `timeout_s` ago."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None
    async with asyncio.timeout(None) as limit:

        def look() -> None:
            nonlocal timer
            left_s = last_progress_s() + timeout_s - time.monotonic()
            if left_s > 0:
                timer = loop.call_later(left_s, look)
            else:
                limit.reschedule(loop.time())

        look()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
