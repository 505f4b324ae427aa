"""One group's way through the pool: from instance to instance, until each of its responses has come to its end.

Whatever an instance has sampled stays. An unfinished response goes on at another instance from where it was: to sample
afresh whatever was in flight would favour short responses, since those had come in before.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Protocol

from async_rl.errors import InstanceError, InstanceRefused, InstanceTooSlow, InstanceUnreachable
from async_rl.fleet.drafts import Draft
from async_rl.fleet.member import Member
from async_rl.fleet.router import Router
from async_rl.protocol import InstanceState, SamplingParams
from async_rl.types import Response, WeightVersion

BAD_REQUEST = (400, 413, 422)
"""Statuses that blame the request: every other instance would answer the same."""


class Fleet(Protocol):
    """What a group needs of the pool."""

    router: Router

    def take_out(self, member: Member, reason: str, *, state: InstanceState = "stale") -> None: ...


class GroupRollout:
    """The responses of one prompt in the making."""

    def __init__(
        self,
        fleet: Fleet,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        version: WeightVersion,
        expected_tokens: float,
    ) -> None:
        """`sampling.seed` is that of the first response, and each further one has the next."""
        assert sampling.seed is not None, "without a seed an interrupted response could not be drawn again"
        self._fleet = fleet
        self._prompt = prompt_token_ids
        self._sampling = sampling
        self._request_id = request_id
        self._version = version
        self._expected_tokens = expected_tokens
        self._drafts = [Draft(sampling.seed + j) for j in range(sampling.n)]
        self._num_requests = 0
        self._num_failures = 0

    async def run(self) -> tuple[list[Response], int]:
        """All responses, and how often a request had to be repeated or continued, plus one.

        Raises:
            NoInstanceLeft, InstanceRefused: see `InferencePool.generate_group`.
        """
        await self._finish(self._drafts)
        return [draft.response() for draft in self._drafts], 1 + self._num_failures

    async def _finish(self, drafts: Sequence[Draft], avoid: Member | None = None) -> None:
        """Takes these drafts to their ends, at one instance or shared among several."""
        cost = self._cost(drafts)
        members = await self._fleet.router.acquire(
            cost, self._expected_tokens, self._version, num_parts=len(drafts), avoid=avoid
        )
        shares = [
            drafts[len(drafts) * i // len(members) : len(drafts) * (i + 1) // len(members)] for i in range(len(members))
        ]
        part = Router.part_of(cost, len(members))
        await _all(self._finish_at(member, share, part) for member, share in zip(members, shares, strict=True))

    async def _finish_at(self, member: Member, drafts: Sequence[Draft], cost: int) -> None:
        """Sends one request, and what it leaves unfinished elsewhere."""
        tokens_before = sum(len(draft.token_ids) for draft in drafts)
        try:
            await self._ask(member, drafts)
        except InstanceError as error:
            if isinstance(error, InstanceRefused) and error.status in BAD_REQUEST:
                raise
            member.num_failures += 1
            self._num_failures += 1
            # Its other requests fail too; the first reason tells the most. A straggler goes on with what it has.
            if member.state in ("ready", "draining") and not isinstance(error, InstanceTooSlow):
                unreachable = isinstance(error, InstanceUnreachable)
                self._fleet.take_out(member, str(error), state="dead" if unreachable else "stale")
        finally:
            member.num_tokens += max(0, sum(len(draft.token_ids) for draft in drafts) - tokens_before)
            self._fleet.router.release(member, cost)
        for draft in drafts:
            # All its tokens came, only the word that it ended did not: there is nothing left to ask for.
            if draft.finish_reason is None and len(draft.token_ids) >= self._sampling.max_tokens:
                draft.finish_reason, draft.instance = "length", member.url
        rest = [draft for draft in drafts if draft.finish_reason is None]
        for draft in rest:
            if draft.token_ids:
                draft.num_continued += 1
            elif not member.client.streams:
                draft.num_resampled += 1
        await _all(self._finish(piece, avoid=member) for piece in _requests(rest))

    async def _ask(self, member: Member, drafts: Sequence[Draft]) -> None:
        """One request; it ends with an error, too, when the pool gives the instance up and cancels it."""
        self._num_requests += 1
        request_id = f"{self._request_id}-{self._num_requests}"
        request = asyncio.create_task(
            member.client.generate(self._prompt, self._sampling, request_id, self._version, drafts)
        )
        member.requests.add(request)
        try:
            await request
        except asyncio.CancelledError as error:
            this_task = asyncio.current_task()
            if this_task is not None and this_task.cancelling():
                raise
            raise InstanceUnreachable(f"instance {member.url} was given up: {member.reason}") from error
        finally:
            member.requests.discard(request)

    def _cost(self, drafts: Sequence[Draft]) -> int:
        """Expected tokens of a request for these drafts."""
        lengths = (max(1, round(self._expected_tokens) - len(draft.token_ids)) for draft in drafts)
        return len(self._prompt) + sum(lengths)


def _requests(drafts: Iterable[Draft]) -> list[list[Draft]]:
    """Into requests of their own: each draft that has tokens, and runs of seeds that follow one another."""
    pieces: list[list[Draft]] = []
    for draft in drafts:
        last = pieces[-1][-1] if pieces else None
        if last is not None and not draft.token_ids and not last.token_ids and last.seed + 1 == draft.seed:
            pieces[-1].append(draft)
        else:
            pieces.append([draft])
    return pieces


async def _all(parts: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs them at once; the first failure cancels the others and is raised as it is."""
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
