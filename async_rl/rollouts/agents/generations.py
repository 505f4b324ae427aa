"""The turns of one rollout that are being sampled; for `session`."""

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from async_rl.method.types import Response
from async_rl.rollouts.agents.messages import Tool
from async_rl.rollouts.agents.rendering import Renderer
from async_rl.rollouts.agents.turn import Limit, Turn, parsed_message, plain_message
from async_rl.rollouts.agents.turn_tree import TurnContext
from async_rl.rollouts.groups.sampling import Decode

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Generation:
    """A turn that is being sampled, the `number`th one of its rollout; several identical requests may wait for it."""

    number: int
    request: TurnContext
    digest: str
    occurrence: int
    """How many turns after the same tokens, those of `digest`, have a seed before this one's."""
    max_tokens: int
    cut_by: Limit | None
    tools: Sequence[Tool] | None
    stop: tuple[str, ...]
    request_id: str | None
    task: "asyncio.Task[tuple[Response, dict[str, Any]]]" = field(init=False)
    num_waiting: int = 0
    turn: Turn | None = None

    def message(self, response: Response, renderer: Renderer, texts_of: Decode) -> dict[str, Any]:
        """What was sampled, as a chat message: as the renderer parses it, or as text."""
        sampled = response.token_ids
        if self.request.conversation is None:
            return plain_message(texts_of([sampled])[0], self.stop)
        try:
            message, calls = renderer.parse(self.request.context, sampled, self.tools)
        except Exception as error:
            # Whatever a policy in training samples must not end the run; it may do so at every turn.
            log.warning(
                "%s: the renderer cannot parse what was sampled, which is passed on as text: %s: %.200s",
                *(self.task.get_name(), type(error).__name__, error),
            )
            return plain_message(texts_of([sampled])[0], self.stop)
        return parsed_message(message, calls, self.stop, (self.digest, self.occurrence))


class Generations:
    """Those in progress, by the id of their request, and the occurrences that are taken."""

    def __init__(self) -> None:
        self._running: list[Generation] = []
        self._by_request: dict[str | None, Generation] = {}
        self._occurrences: dict[str, set[int]] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    def waited_for(self, request_id: str | None) -> Generation | None:
        """The one that a request of this id shares, if it is in progress."""
        return self._by_request.get(request_id)

    def free_occurrence(self, digest: str) -> int:
        taken = self._occurrences.get(digest, ())
        return next(number for number in itertools.count() if number not in taken)

    def begin(self, generation: Generation) -> None:
        self._occurrences.setdefault(generation.digest, set()).add(generation.occurrence)
        self._running.append(generation)
        if generation.request_id is not None:
            self._by_request[generation.request_id] = generation

    def end(self, generation: Generation) -> None:
        """It was sampled."""
        self._running.remove(generation)
        if generation.request_id is not None:
            del self._by_request[generation.request_id]

    def give_up(self, generation: Generation) -> None:
        """Ends one that nobody waits for any more; the next one after the same tokens samples the same."""
        generation.task.cancel()
        self.end(generation)
        self.forget(generation)

    def forget(self, generation: Generation) -> None:
        """Lets the next turn after the same tokens sample the same."""
        self._occurrences[generation.digest].discard(generation.occurrence)

    def cancel(self) -> None:
        """Ends the sampling of all."""
        for generation in self._running:
            generation.task.cancel()
