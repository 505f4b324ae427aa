"""Refuses requests of a trainer that another one has replaced: it was cut off or stopped, and has gone on since.

Trainers of one run send `RUN_UID:TERM` in a header; the term grows with each trainer that takes over the run. It wraps
the embedded engine's application, and vLLM's own through its `--middleware` option. Requests without the header pass.

It also refuses what a trainer asks the workers, and what would end the stream, while another run sends them weights: an
answer would wait for its end. An instance that a run has put to sleep is woken by that run only, which may have the
device.
"""

import logging
import re
from http import HTTPStatus
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from async_rl.shared.net.http_guard import error_response
from async_rl.shared.protocol.routes import (
    COLLECTIVE_RPC,
    FINISH_WEIGHT_UPDATE,
    INIT_WEIGHT_TRANSFER,
    OPEN_PATHS,
    SLEEP,
    START_WEIGHT_UPDATE,
    SUPERSEDED_TERM,
    TERM_HEADER,
    UPDATE_WEIGHTS,
    WAKE_UP,
)

logger = logging.getLogger("inference_service")

MAX_RUNS: Final = 256
"""Runs whose terms are remembered; the one that was heard of the longest time ago is forgotten."""

OF_ONE_RUN: Final = frozenset(
    {COLLECTIVE_RPC, SLEEP, INIT_WEIGHT_TRANSFER, START_WEIGHT_UPDATE, UPDATE_WEIGHTS, FINISH_WEIGHT_UPDATE}
)
"""Not for other runs while weights are sent."""

_HEADER: Final = TERM_HEADER.lower().encode()
_VALUE: Final = re.compile(rb"([A-Za-z0-9-]{1,64}):([0-9]{1,12})")


class TermGuard:
    """Responds 409 to a term below the highest one of the same run, and 400 to a header that is none; and 409 to a call
    of the workers, and to another update, while another run sends weights. 409, too, to whoever would wake what a run
    has put to sleep.

    It learns no term from a path that needs no token: whoever has none must neither fence a trainer nor have its run
    forgotten.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._highest: dict[bytes, int] = {}
        self._sending: list[bytes] = []
        """Runs whose weights are being received."""
        self._sleeper = b""
        """The run that has put the instance to sleep, until it wakes it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # The application's own beginning and end, which have no path.
            await self._app(scope, receive, send)
            return
        reported = dict(scope["headers"]).get(_HEADER)
        if reported is not None and (refusal := self._refusal(reported, scope["path"] not in OPEN_PATHS)) is not None:
            message, status = refusal
            await error_response(message, status, SUPERSEDED_TERM)(scope, receive, send)
            return
        run = (reported or b"").partition(b":")[0]
        others = [sender for sender in self._sending if sender != run]
        if run and others and scope["path"] in OF_ONE_RUN:
            await error_response(_taken(others[0].decode(), run.decode()), HTTPStatus.CONFLICT)(scope, receive, send)
            return
        if scope["path"] == WAKE_UP:
            if self._sleeper not in (b"", run):
                await error_response(_slept(self._sleeper.decode()), HTTPStatus.CONFLICT)(scope, receive, send)
                return
            self._sleeper = b""
        elif scope["path"] == SLEEP and run:
            self._sleeper = run
        if not run or scope["path"] != UPDATE_WEIGHTS:
            await self._app(scope, receive, send)
            return
        self._sending.append(run)
        try:
            await self._app(scope, receive, send)
        finally:
            self._sending.remove(run)

    def _refusal(self, reported: bytes, learns: bool) -> tuple[str, HTTPStatus] | None:
        match = _VALUE.fullmatch(reported)
        if match is None:
            message = f"the header {TERM_HEADER} is {reported.decode(errors='replace')!r}: expected RUN_UID:TERM"
            return message, HTTPStatus.BAD_REQUEST
        run, term = match[1], int(match[2])
        highest = max(self._highest.get(run, term), term)
        if learns:
            self._note(run, highest)
        if term < highest:
            name = run.decode()
            return f"run {name} is at term {highest}, this request is of term {term}", HTTPStatus.CONFLICT
        return None

    def _note(self, run: bytes, term: int) -> None:
        # Taken out and put back: the dict's order is that of the last requests.
        self._highest.pop(run, None)
        self._highest[run] = term
        if len(self._highest) > MAX_RUNS:
            del self._highest[next(iter(self._highest))]


def _slept(run: str) -> str:
    return (
        f"the trainer of run {run} has put this instance to sleep, and may have its device (the name of a run is in "
        "run.dir/.lease/run): only that run wakes it; end the run and start the instance anew to use it otherwise"
    )


def _taken(sender: str, run: str) -> str:
    return (
        f"the trainer of run {sender} sends weights to this instance now, and this is run {run} (the name of a run is "
        "in run.dir/.lease/run): an instance serves one run; end one of them, or give each its own instances"
    )
