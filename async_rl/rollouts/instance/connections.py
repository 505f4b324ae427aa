"""The connections to all instances of a pool; for `async_rl.rollouts.instance.client`, on one event loop."""

import resource
from dataclasses import dataclass

import aiohttp

from async_rl.shared.net.http_client import authorization
from async_rl.shared.protocol.routes import TERM_HEADER

KEEPALIVE_S = 2.0
"""Idle connections are closed before the server does (uvicorn: 5 s): a POST must not use a connection being closed."""

OTHER_FILES = 256
"""Open files left to the rest of the process; each connection uses one. Further requests wait for a free connection."""

FILES_WITHOUT_LIMIT = 10_240
"""Used where the hard limit is infinite: the most that macOS gives a process (OPEN_MAX), whatever it reports."""

CONTROL_SHARE = 4
"""One in this many connections is for health checks and control calls, so that they do not wait for generations."""


@dataclass(frozen=True, slots=True)
class FilePlan:
    """`soft`: the open-files limit to set, None to keep it; number of connections of each kind, 0 for no limit."""

    soft: int | None
    num_generating: int
    num_control: int


def plan_files(soft: int, hard: int, infinity: int) -> FilePlan:
    """Plans from a process's limits of open files; `infinity` is the system's value for no limit."""
    if soft == infinity:
        return FilePlan(None, 0, 0)
    limit = max(soft, FILES_WITHOUT_LIMIT if hard == infinity else hard)
    return FilePlan(None if limit == soft else limit, *_shares(limit))


def _shares(limit: int) -> tuple[int, int]:
    connections = max(2, limit - OTHER_FILES)
    num_control = max(1, connections // CONTROL_SHARE)
    return connections - num_control, num_control


class Connections:
    """Two `aiohttp.ClientSession`s, opened by the first call on the event loop: one for generate requests, which may
    use all of its connections for long, and one for everything else."""

    def __init__(self, token: str | None = None, term: str | None = None) -> None:
        """`term` is the trainer's lease on its run, `RUN_UID:TERM`; None for other programs."""
        # No compression: a few compressed bytes may expand to gigabytes.
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"} | authorization(token)
        if term is not None:
            self._headers[TERM_HEADER] = term
        self._sessions: tuple[aiohttp.ClientSession, aiohttp.ClientSession] | None = None

    @property
    def generating(self) -> aiohttp.ClientSession:
        return self._opened()[0]

    @property
    def control(self) -> aiohttp.ClientSession:
        return self._opened()[1]

    async def close(self) -> None:
        for session in self._sessions or ():
            await session.close()

    def _opened(self) -> tuple[aiohttp.ClientSession, aiohttp.ClientSession]:
        if self._sessions is None:
            num_generating, num_control = _raise_limit()
            self._sessions = self._open(num_generating), self._open(num_control)
        return self._sessions

    def _open(self, limit: int) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=limit, keepalive_timeout=KEEPALIVE_S)
        return aiohttp.ClientSession(connector=connector, headers=self._headers, auto_decompress=False)


def _raise_limit() -> tuple[int, int]:
    """Raises the process's limit of open files to its maximum; returns the number of connections of each kind."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    plan = plan_files(soft, hard, resource.RLIM_INFINITY)
    if plan.soft is not None:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (plan.soft, hard))
        except (ValueError, OSError):
            # The system allows less than it reports; the initial limit is enough.
            return _shares(soft)
    return plan.num_generating, plan.num_control
