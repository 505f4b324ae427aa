"""One running request at one instance: its unfinished responses, and its cancellation."""

import asyncio
import time
from collections.abc import Sequence

from async_rl.instance.partial_rollout import PartialRollout


class Request:
    """A group's request, or a part of it.

    `cost` is the router's count for it, `num_moves` how often its partial rollouts were moved to another instance.
    """

    def __init__(self, partials: Sequence[PartialRollout], cost: int, num_moves: int = 0) -> None:
        self.partials = partials
        self.cost = cost
        self.num_moves = num_moves
        self.num_before = sum(len(partial.token_ids) for partial in partials)
        """Tokens of the partial rollouts when it was sent."""
        self.sent_s = time.monotonic()
        self.first_token_s: float | None = None
        self.num_tokens = 0
        """Response tokens received for it."""
        self.num_ended = 0
        """Responses that are finished."""
        self.is_moved = False
        """Whether it was cancelled to be continued by another instance, which is not a fault."""
        self.task: asyncio.Task[None] | None = None

    @property
    def num_open(self) -> int:
        return len(self.partials) - self.num_ended

    @property
    def waits(self) -> bool:
        """Whether it may still be in the instance's own queue: it has no token yet."""
        return self.first_token_s is None

    def speed(self, now_s: float) -> float:
        """Tokens per second of each of its responses, since the first token."""
        if self.first_token_s is None:
            return 0.0
        return self.num_tokens / len(self.partials) / max(now_s - self.first_token_s, 1e-3)

    def cancel(self) -> None:
        """Gives it up: its instance is lost."""
        if self.task is not None:
            self.task.cancel()

    def move(self) -> None:
        """Cancels it, so that another instance continues it."""
        self.is_moved = True
        self.cancel()
