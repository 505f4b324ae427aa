"""The outstanding tokens of the run's other data-parallel leaders at each instance, as they last reported them.

For `async_rl.fleet.server`, on the producer's event loop.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from async_rl.pool.member import Member

REPORT_TIMEOUT_S = 5.0
"""A leader that sends no report for longer counts as idle: its requests must not hold a drained instance forever."""


class LeaderReports:
    """Keeps `Member.outstanding_elsewhere` of all members at the sum of the leaders' last reports."""

    def __init__(self, members: Callable[[], Sequence[Member]], timeout_s: float = REPORT_TIMEOUT_S) -> None:
        self._members = members
        self._timeout_s = timeout_s
        self._reports: dict[int, Mapping[str, int]] = {}
        self._expiries: dict[int, asyncio.TimerHandle] = {}

    def note(self, leader: int, outstanding_tokens: Mapping[str, int]) -> None:
        """Replaces this leader's previous report; URLs of no member are ignored."""
        if leader in self._expiries:
            self._expiries[leader].cancel()
        self._reports[leader] = outstanding_tokens
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
        for member in self._members():
            member.outstanding_elsewhere = sum(report.get(member.url, 0) for report in self._reports.values())
