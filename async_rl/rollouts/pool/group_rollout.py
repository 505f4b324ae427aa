"""Processing of one group by the pool: on one instance or several in turn, until each of its responses is finished.

Sampled tokens are kept. An unfinished response is continued by another instance from its last token: sampling all
unfinished responses again from the start would favour short responses, since those had finished before.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from async_rl.errors import ConnectionLost, InstanceError, InstanceRefused, PromptFailed, RequestInvalid
from async_rl.method.types import Response, WeightVersion
from async_rl.rollouts.instance.partial_rollout import PartialRollout
from async_rl.rollouts.pool.member import GroupRequest, Member
from async_rl.rollouts.pool.roster import Roster
from async_rl.rollouts.pool.router import Cached
from async_rl.shared.protocol.inference import SamplingParams

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


class GroupRollout:
    """The responses of one prompt, while they are generated."""

    def __init__(
        self,
        roster: Roster,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        version: WeightVersion,
        expected_tokens: float,
        cached: Cached | None = None,
    ) -> None:
        """`sampling.seed` is the seed of the first response; each further one has the next seed."""
        assert sampling.seed is not None, "without a seed an interrupted response could not be drawn again"
        self._roster = roster
        self._prompt = prompt_token_ids
        self._sampling = sampling
        self._request_id = request_id
        self._version = version
        self._expected_tokens = expected_tokens
        self._cached = cached
        self._partials = [PartialRollout(sampling.seed + j) for j in range(sampling.n)]
        self._num_requests = 0
        self._attempts = Attempts()

    async def run(self) -> tuple[list[Response], int]:
        """All responses, and how often a request had to be repeated or continued, plus one.

        Raises:
            NoInstanceLeft, RequestInvalid, PromptFailed: see `InferencePool.generate_group`.
        """
        await self._finish(self._partials)
        responses = [partial.response(has_prompt_routes=not i) for i, partial in enumerate(self._partials)]
        return responses, 1 + self._attempts.num_failures

    async def _finish(self, partials: Sequence[PartialRollout], last: Member | None = None, num_moves: int = 0) -> None:
        """Finishes these partial rollouts; `last` had them before."""
        cost = self._cost(partials)
        avoid = self._attempts.refused_by | ({last.url} if last is not None else set())
        member = await self._roster.router.acquire(
            cost,
            self._expected_tokens,
            self._version,
            num_responses=len(partials),
            avoid=avoid,
            cached=self._cached,
        )
        pieces = _fitting(partials, cost, member.client.max_concurrency)
        await _all(self._finish_at(member, GroupRequest(piece, own_cost, num_moves)) for piece, own_cost in pieces)

    async def _finish_at(self, member: Member, request: GroupRequest) -> None:
        """Sends one request, and lets other instances finish its unfinished responses."""
        try:
            await self._ask(member, request)
        except InstanceError as error:
            if isinstance(error, RequestInvalid):
                raise
            self._note_failure(member, request, error)
        finally:
            member.circuit.ended(request.sent_s)
            self._roster.router.release(member, request.cost)
        for partial in request.partials:
            # All tokens were received, only the finish reason was not: there is nothing left to generate.
            if partial.finish_reason is None and (reason := self._end_of(partial)):
                if self._sampling.routed_experts:
                    # Its routes were lost with that. Whether they are does not depend on the response.
                    partial.cut(0)
                    continue
                partial.finish_reason, partial.instance = reason, member.url
        rest = [partial for partial in request.partials if partial.finish_reason is None]
        num_cut = request.num_before + request.num_tokens - sum(len(partial.token_ids) for partial in request.partials)
        for partial in rest:
            if partial.token_ids:
                partial.num_continued += 1
            elif num_cut > 0 or not member.client.streams:
                partial.num_resampled += 1
        num_moves = request.num_moves + request.is_moved
        await _all(self._finish(piece, last=member, num_moves=num_moves) for piece in _requests(rest))

    async def _ask(self, member: Member, request: GroupRequest) -> None:
        """Runs one request; it also ends with an error when the pool gives up the instance and cancels it."""
        self._num_requests += 1
        request_id = f"{self._request_id}-{self._num_requests}"
        request.task = asyncio.create_task(
            member.client.generate(
                self._prompt,
                self._sampling,
                request_id,
                self._version,
                request.partials,
                boot_id=member.boot_id,
                model=self._roster.model_tokens,
                on_progress=lambda num_tokens, num_ended: self._note_progress(member, request, num_tokens, num_ended),
            )
        )
        member.begin(request)
        try:
            await request.task
        except asyncio.CancelledError as error:
            this_task = asyncio.current_task()
            if this_task is not None and this_task.cancelling():
                raise
            if request.is_moved:
                return
            raise ConnectionLost(f"instance {member.url} was given up: {member.reason}") from error
        finally:
            member.end(request)
        member.response_speed = request.speed(time.monotonic()) or member.response_speed

    def _note_progress(self, member: Member, request: GroupRequest, num_tokens: int, num_ended: int) -> None:
        member.last_received_s = time.monotonic()
        if (num_tokens, num_ended) == (request.num_tokens, request.num_ended):
            return
        member.circuit.succeeded(request.sent_s)
        if request.waits or num_ended != request.num_ended:
            self._roster.router.wake()
        member.progress(request, num_tokens, num_ended, member.last_received_s)

    def _note_failure(self, member: Member, request: GroupRequest, error: InstanceError) -> None:
        """Applies the consequences of a failed request to its instance and this group.

        Raises:
            PromptFailed: the group has failed too often.
        """
        member.num_failures += 1
        self._roster.request_failed(member, request.sent_s, error)
        if member.state == "gone":
            # It was removed from the pool: that does not count against the prompt, however often it happens.
            self._attempts.interrupted()
            return
        # Tokens received and removed again are no progress: the next attempt may end the same way.
        num_kept = sum(len(partial.token_ids) for partial in request.partials) - request.num_before
        self._attempts.failed(member.url, error, max(0, num_kept))
        if (verdict := self._attempts.verdict) is not None:
            raise PromptFailed(
                f"request {self._request_id!r} of {len(self._prompt)} prompt tokens {verdict}"
            ) from error

    def _end_of(self, partial: PartialRollout) -> str | None:
        """How the last token ends the response, if it does."""
        if partial.token_ids and partial.token_ids[-1] in self._sampling.stop_token_ids:
            return "stop"
        return "length" if len(partial.token_ids) >= self._sampling.max_tokens else None

    def _cost(self, partials: Sequence[PartialRollout]) -> int:
        """Expected tokens of a request for these partials."""
        lengths = (max(1, round(self._expected_tokens) - len(partial.token_ids)) for partial in partials)
        return len(self._prompt) + sum(lengths)


def _fitting(
    share: Sequence[PartialRollout], cost: int, max_responses: int | None
) -> list[tuple[Sequence[PartialRollout], int]]:
    """A share in pieces of as many responses as the instance generates at once, and the cost of each: vLLM refuses
    requests for more."""
    assert share, "an instance gets no empty part of a group"
    size = max_responses or len(share)
    pieces = [share[i : i + size] for i in range(0, len(share), size)]
    rest = cost - cost // len(pieces) * (len(pieces) - 1)
    return [(piece, cost // len(pieces) if i else rest) for i, piece in enumerate(pieces)]


def _requests(partials: Iterable[PartialRollout]) -> list[list[PartialRollout]]:
    """Divides into requests: one for each partial rollout with tokens, and one for each run of consecutive seeds."""
    pieces: list[list[PartialRollout]] = []
    for partial in partials:
        last = pieces[-1][-1] if pieces else None
        if last is not None and not partial.token_ids and not last.token_ids and last.seed + 1 == partial.seed:
            pieces[-1].append(partial)
        else:
            pieces.append([partial])
    return pieces


async def _all(parts: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs the parts concurrently; the first failure cancels the others and is raised unwrapped."""
    coros = list(parts)
    if len(coros) == 1:
        await coros[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for coro in coros:
                group.create_task(coro)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
