"""How often one group's requests failed, and when the prompt is to blame rather than the instances. Pure."""

from collections import Counter

from async_rl.errors import InstanceError, InstanceRefused

MAX_REFUSING_INSTANCES = 3
"""A server error (5xx) from this many instances blames the prompt: each tried it after the others had failed."""

MAX_REFUSALS = 6
"""The same from one instance, if there are no others: with the pauses of its circuit that takes 15 s."""

MAX_FAILURES = 12
"""Failures of any kind at one instance, lost connections and 429 among them; with the pauses over a minute."""

BUSY = 503
"""Means that the server cannot serve at the moment, and nothing about the request."""


class Attempts:
    """The failures of one group since it last made tokens, by the instance's URL."""

    def __init__(self) -> None:
        self.num_failures = 0
        """All failed or interrupted requests of the group."""
        self._failures: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}

    @property
    def refused_by(self) -> frozenset[str]:
        """Instances that responded with a server error; others should try first."""
        return frozenset(self._refusals)

    def interrupted(self) -> None:
        """A request was ended by a command to the pool: not a failure."""
        self.num_failures += 1

    def failed(self, url: str, error: InstanceError, num_tokens: int) -> None:
        """A request at `url` failed after `num_tokens` tokens that are kept."""
        self.num_failures += 1
        if num_tokens:
            self._failures.clear()
            self._refusals.clear()
            self._reasons.clear()
            return
        self._failures[url] += 1
        self._reasons[url] = str(error)
        if isinstance(error, InstanceRefused) and error.status >= 500 and error.status != BUSY:
            self._refusals[url] += 1

    @property
    def verdict(self) -> str | None:
        """Why further attempts are useless; None while they are not."""
        is_refused = (
            len(self._refusals) >= MAX_REFUSING_INSTANCES or max(self._refusals.values(), default=0) >= MAX_REFUSALS
        )
        if not is_refused and max(self._failures.values(), default=0) < MAX_FAILURES:
            return None
        total = self._failures.total()
        reasons = "".join(f"\n  {url}: {reason}" for url, reason in self._reasons.items())
        return f"failed {total} times in a row, on {len(self._failures)} instances, without a token:{reasons}"
