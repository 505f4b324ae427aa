"""What the run's other data-parallel leaders last reported: their outstanding tokens, and the drains they know.

For `async_rl.fleet.server`, on the producer's event loop.
"""

import asyncio
import math

from async_rl.pool.roster import Roster
from async_rl.protocol.fleet import SyncRequest

REPORT_TIMEOUT_S = 5.0
"""A leader that sends no report for longer counts as idle: its requests must not hold a drained instance forever."""


class LeaderReports:
    """Keeps `Member.outstanding_elsewhere` of the roster's members at the sum of the leaders' last reports, and
    `Roster.drains_known_elsewhere` at the least of them."""

    def __init__(self, roster: Roster, timeout_s: float = REPORT_TIMEOUT_S) -> None:
        self._roster = roster
        self._timeout_s = timeout_s
        self._reports: dict[int, SyncRequest] = {}
        self._expiries: dict[int, asyncio.TimerHandle] = {}

    def note(self, report: SyncRequest) -> None:
        """Replaces this leader's previous report; URLs of no member are ignored."""
        leader = report.leader
        if leader in self._expiries:
            self._expiries[leader].cancel()
        self._reports[leader] = report
        self._expiries[leader] = asyncio.get_running_loop().call_later(self._timeout_s, self._forget, leader)
        self._add_up()

    def close(self) -> None:
        """Cancels the expiry timers."""
        for expiry in self._expiries.values():
            expiry.cancel()

    def _forget(self, leader: int) -> None:
        del self._reports[leader], self._expiries[leader]
        self._add_up()

    def _add_up(self) -> None:
        reports = self._reports.values()
        self._roster.drains_known_elsewhere = min((report.num_drains for report in reports), default=math.inf)
        for member in self._roster.members:
            member.outstanding_elsewhere = sum(report.outstanding_tokens.get(member.url, 0) for report in reports)
