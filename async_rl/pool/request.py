"""One request under way at one instance: what of it is still open, and how it may be called off."""

import asyncio
import time
from collections.abc import Sequence

from async_rl.instance.partial_rollout import Draft


class Request:
    """A group's request, or a part of it.

    `cost` is what the router counts for it, `num_moves` how often its drafts were moved to another instance so far.
    """

    def __init__(self, drafts: Sequence[Draft], cost: int, num_moves: int = 0) -> None:
        self.drafts = drafts
        self.cost = cost
        self.num_moves = num_moves
        self.num_before = sum(len(draft.token_ids) for draft in drafts)
        """Tokens that the drafts had when it was sent."""
        self.sent_s = time.monotonic()
        self.first_token_s: float | None = None
        self.num_tokens = 0
        """Response tokens that came in answer to it."""
        self.num_ended = 0
        """Responses that have come to their end."""
        self.is_moved = False
        """Whether it was called off to go on at another instance, which is nobody's fault."""
        self.task: asyncio.Task[None] | None = None

    @property
    def num_open(self) -> int:
        return len(self.drafts) - self.num_ended

    @property
    def waits(self) -> bool:
        """Whether it may still be in the instance's own queue: nothing was sampled for it yet."""
        return self.first_token_s is None

    def speed(self, now_s: float) -> float:
        """Tokens per second of each of its responses, since the first one."""
        if self.first_token_s is None:
            return 0.0
        return self.num_tokens / len(self.drafts) / max(now_s - self.first_token_s, 1e-3)

    def cancel(self) -> None:
        """Gives it up: its instance is lost."""
        if self.task is not None:
            self.task.cancel()

    def move(self) -> None:
        """Calls it off, so that it goes on at another instance."""
        self.is_moved = True
        self.cancel()
